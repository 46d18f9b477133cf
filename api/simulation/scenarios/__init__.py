"""Clusters under load that show one capability each: classes, tenants, scaling, roles."""

"""Constants fitted from measurements; see README.md beside this file."""

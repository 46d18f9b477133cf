"""The moving of one request as pure state machines: messages, ledger (gateway), seat (instance)."""

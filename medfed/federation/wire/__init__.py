"""The wire: messages, codecs, channel and ledger."""

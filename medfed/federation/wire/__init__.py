"""What travels: messages, codecs, channel and ledger."""

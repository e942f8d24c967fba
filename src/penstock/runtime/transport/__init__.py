"""Values between ranks: channels, links, buffers and process groups."""

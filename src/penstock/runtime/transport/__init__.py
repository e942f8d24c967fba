"""Messages between ranks: channels, buffers, the communicator and process groups."""

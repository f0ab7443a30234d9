"""Client and receiver send each other the messages of the protocol; both ends have them."""

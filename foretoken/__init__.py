"""foretoken: speculative decoding, exact and measured."""

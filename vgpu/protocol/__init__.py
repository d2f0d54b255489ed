"""The messages between the library and the arbiter, and the arbiter's status document."""

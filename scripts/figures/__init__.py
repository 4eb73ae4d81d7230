"""The pictures of the documentation, a module for the pages of a topic."""

"""The command line `ragrl`: `main` parses and dispatches; each other module defines a group."""

"""What is searched: closed forms and measured curves, by kind, and how the curves were measured."""

"""One run on the machines of a hostfile: a head, and over ssh a launcher on every machine."""

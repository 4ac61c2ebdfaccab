"""What starts, stops and watches an installation on this machine."""

"""Projects, to which experiments and models belong."""

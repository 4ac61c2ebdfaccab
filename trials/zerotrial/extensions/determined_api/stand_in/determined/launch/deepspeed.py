"""Determined's launcher ``determined.launch.deepspeed``."""

from zerotrial.extensions.determined_api.launch import main

if __name__ == "__main__":
    main()

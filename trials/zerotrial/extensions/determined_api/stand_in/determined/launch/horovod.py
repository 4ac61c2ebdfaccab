"""Determined's launcher ``determined.launch.horovod``."""

from zerotrial.extensions.determined_api.launch import main

if __name__ == "__main__":
    main()

"""Determined's launcher ``determined.launch.torch_distributed``."""

from zerotrial.extensions.determined_api.launch import main

if __name__ == "__main__":
    main()

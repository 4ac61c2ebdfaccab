"""Documented name of the planner: ``python -m zerotrial.plan experiment.yaml``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("zerotrial.extensions.planner", run_name="__main__", alter_sys=True)

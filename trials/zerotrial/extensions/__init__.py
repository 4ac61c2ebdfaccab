"""Extensions of trials and the engine, each registered by an entry point.

The core imports none of them. A folder that is deleted takes its names with it.
"""

"""Everything that decides a run, as frozen data.

recipes/ turns three words (recipe, method, strategy) into a complete `Config`. Start with config.py; only the recipes
know which values belong to which data, method and strategy.
"""

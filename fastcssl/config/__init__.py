"""Everything that decides a run, as frozen data.

Three words (data, method, strategy) come in through recipes/, and a complete `Config` goes out. Start with config.py;
the recipes are the only place that knows which values belong to which data, method and strategy.
"""

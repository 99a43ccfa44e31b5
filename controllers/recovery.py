"""temporary"""
class Recovery:
    step = None
    tracker_state = None
    def __init__(self, config): pass
    def restore(self, trainer): return 0
    def save(self, *a): pass

"""CONDUCTS: learns facts, keeps the world and the backlog, asks the engine for a plan, names the effects. No I/O.

Everything that changes a state is here; `controller.Controller.step` is the one way in.
"""

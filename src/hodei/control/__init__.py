"""The controller: learns facts, keeps the state and the queues, runs the engine, returns effects. No I/O.

Everything that changes the state is here; `controller.Controller.step` is the only entry.
"""

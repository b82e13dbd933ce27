"""The host agent: one small long-lived process that starts, limits, monitors and stops runs, and outlives the server.

Standard library only: it must start fast on any host with Python. It decides nothing: it carries out each order once,
and a run's end is on disk before it is reported. `__main__` opens the socket, `service` answers the server, `runs` holds
the table of runs, `spawn` starts them and reads their status files, `limits` enforces limits, `supervision` stops them
and checks health, idle time and checkpoints, `exec` runs commands inside them, `logs` keeps their output, `journal`
survives a restart.
"""

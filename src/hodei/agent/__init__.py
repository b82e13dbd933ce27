"""ON A HOST: one small long-lived process that starts, limits, watches and stops runs, and outlives the server.

Standard library only, and nothing of the rest of the house: it must start in a blink on any host that has Python.
It never decides what runs where; it does what it is told, once, and remembers how it ended. A run's end is on disk
before anyone hears of it. The story: `__main__` opens the door, `service` speaks with the server, `runs` conducts the
lives of runs, `spawn` gives birth (`status` reads what came of it), `limits` fences, `stops` ends them (after `hook`), `looks` sees what they saved;
while they run, `saving`, `checks` and `idle` do things `beside` them;
`logs` keeps their words, `journal` and `recovery` remember.
"""

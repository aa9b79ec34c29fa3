"""For every test: threads that wait spin only briefly, or two test processes on two cores would take minutes for seconds."""

from miles.run.threads import spin_briefly

spin_briefly()

"""For every test: threads that wait do not spin, or two test processes on two cores would take minutes for seconds."""

from miles.run.threads import wait_passively

wait_passively()

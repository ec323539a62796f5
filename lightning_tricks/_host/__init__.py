"""The process and the machine that it runs on: how a process ends, what the machine has, what can be written."""

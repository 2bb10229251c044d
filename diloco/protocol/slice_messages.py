# SPDX-License-Identifier: Apache-2.0
"""Messages between the rendezvous of a learner of several slices and an agent.

An *agent* runs on each host of each slice and starts the learner's process
there. The *rendezvous* runs outside of all slices: it decides which of them
form the next world, and tells their agents.
"""

from diloco.protocol.values import Value


class FromAgent(Value):
  """A message that an agent may send to the rendezvous."""


class AgentHere(FromAgent):
  """An agent's first message: which host of which slice it is."""

  slice: int
  host: int  # Of the slice.
  slices: int  # Of the learner.
  hosts: int  # Of each slice.
  world: int  # Of its process that runs; 0: none does.


class AgentReady(FromAgent):
  """No process runs here; the agent waits for the next world."""

  coordinator: str  # host:port where others reach this host, if it is first.
  world: int  # Of the last process; 0: there was none.
  code: int  # Its exit code; −n: it died of signal n.


class AgentLeaves(FromAgent):
  """This host was told to stop: its slice has to leave the world."""


class FromRendezvous(Value):
  """A message that the rendezvous may send to an agent."""


class StartWorld(FromRendezvous):
  """Start a process of this world."""

  world: int  # From 1.
  slices: tuple[int, ...]  # That take part, ascending.
  coordinator: str  # host:port of its first host.
  service: str  # host:port of JAX's coordination service.
  secret: str  # By which its hosts know each other, besides the run's token.


class AskForWorld(FromRendezvous):
  """The world is to end at its next boundary, with that in memory."""


class EndProcess(FromRendezvous):
  """End the process: at once, or in good order."""

  kill: bool


class LearnerOver(FromRendezvous):
  """The agent is to end with this exit code."""

  code: int


FROM_AGENT = tuple(FromAgent.__subclasses__())
FROM_RENDEZVOUS = tuple(FromRendezvous.__subclasses__())

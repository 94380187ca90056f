"""A deterministic simulator of engines with the connector: one seed decides everything, nothing sleeps, no threads.

    World       time, engines; users, operators, bad luck (workload) and a user with prompts for two engines (proxy)
     Outside    the network with its carriers, the folder on a disk, and their faults
     Engine     core loop; SchedulerHalf behind SchedulerModel, which plans on a BlockPool
      Rank      a process with WorkerHalf and TransferEngine; the model
       Device   streams of work that runs late

What is real: both halves, the index, the transfer engine with its lines, the peers' protocol and transports, the
filesystem backend, and every byte. What is modelled: the engine
around them, after vLLM's scheduler; the device, whose streams run in any order that streams and events allow; the
model, whose tokens are digests of every byte they rest on. The expected tokens are computed without a cache, so a
foreign, stale or half-written byte is a wrong token.

Who owns what, and in which states it is:

- a request (`requests.SimulatedRequest`) is WAITING, LOADING, RUNNING, PREEMPTED or FINISHED; the scheduler model alone
  changes it. What the device knows of it is a `DeviceSequence` for each admission, to which tokens in flight belong.
- a device block is free, held by requests, pinned by the connector, or both; `BlockPool` counts them apart.
- a step is planned, launched on each rank, computed, reported by each rank, processed. Between the first and the last
  of these an engine that plans ahead plans others, and users abort what it computes.
- a job is planned, runs, is reported by a rank, is taken in; `checks.JobBook` follows it by plans and reports alone,
  which are all that crosses the halves.
- an operation on a stream waits, is due, has run.

What takes time is an event of the one queue (`clock.VirtualTime`), also what the network and the disk do later. One
thing is left out: weights that are updated on one engine and not on another one while blocks travel between them (the
proxy waits, since no engine can tell).

After every step `Engine.check`, at rest `Engine.check_at_rest`; whatever does not hold raises `checks.Violation`, which
ends the world. `shrink` then looks for the shortest history that still fails.
"""

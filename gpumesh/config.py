"""Every tunable and limit of gpumesh, with its unit and its reason. No code that acts."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# --- the wire
PROTOCOL_VERSION = 1
DEFAULT_PORT = 8000
PREAUTH_FRAME_BYTES = 4 * KIB  # A stranger can make us hold this much, no more.
CONTROL_FRAME_BYTES = 16 * MIB  # A batch of small things; anything larger travels as chunks.
CHUNK_BYTES = 1 * MIB  # At 1 MB/s a heartbeat waits about a second behind one chunk.
BULK_MESSAGE_BYTES = 1 * MIB  # Messages with more raw bytes than this take the bulk lane, in chunks.
TRANSFER_BYTES = 64 * GIB  # One value; larger is refused at the sender and at the receiver.
HANDSHAKE_SECONDS = 5.0  # From the first byte to Welcome; a slow transatlantic link needs under 2.
PENDING_HANDSHAKES = 64  # Strangers held at once; one more and the oldest is dropped.
HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 30.0  # Six missed heartbeats: the peer is dead.
CONNECT_SECONDS = 5.0
CONNECT_STAGGER_SECONDS = (
    0.25  # From one IP of a name to the next: whoever answers, answers sooner, and the first is preferred.
)
RECONNECT_SECONDS = 60.0  # How long a client looks for a lost coordinator before its futures fail.
RECONNECT_FIRST_DELAY_SECONDS = 0.1
RECONNECT_MAX_DELAY_SECONDS = (
    1.5  # A restart may cost 2 s beyond its own time, the way back included. In a mesh of few workers.
)
STEADY_SECONDS = 0.5  # A connection that breaks sooner was as good as none: a pair that cannot agree meets ever more rarely.
OUTAGE_LINE_SECONDS = 60.0  # A worker says again that its coordinator is not there, ...
OUTAGE_LINE_MAX_SECONDS = 1200.0  # ... each time after twice as long, up to three lines an hour.
OUTAGE_REASONS = 8  # As many different reasons are told as they come; more of them wait for such a line.
RECONNECTS_PER_SECOND = 40.0  # Of all workers of a mesh together, about: a hundred handshakes cost the coordinator 50 ms.
UNSENT_KERNEL_BYTES = 256 * KIB  # In a socket's own queue: on a slow link a heartbeat waits behind no more of it.
GOODBYE_SECONDS = 1.0  # From a coordinator's goodbyes to closing on who does not read them.
OUTBOX_PAUSE_BYTES = 4 * MIB  # Bytes waiting for one slow peer before what feeds it is paused.

# --- values
INLINE_BUFFER_BYTES = 64 * KIB  # Smaller buffers are copied into the pickle; larger ones ride beside it.
LARGE_FUNCTION_BYTES = 1 * MIB  # A function body over this gets one warning.
MAX_FUNCTION_BYTES = 256 * MIB  # Over this it is refused: something large was captured by mistake.
FUNCTION_CACHE_ENTRIES = 1024  # Function bodies kept by a coordinator, a worker or a runner; least recently used go.

# --- objects
SPARE_BYTES = (
    4 * MIB
)  # Up to this size a client asks ahead for room for its next value: that hides a round trip at each of many alike.
SPARE_SECONDS = 1.0  # So long that room may lie there unused.
INLINE_VALUE_BYTES = 64 * KIB  # A larger value goes through the object store; a smaller one inside its task's message.
MAX_KEPT_ARGUMENTS_BYTES = (
    256 * MIB
)  # Of one call, kept by its client to store them again when the coordinator is lost; more is lost with it.
FETCH_WINDOW_BYTES = 1 * MIB  # Of one transfer at first: what a task waits behind. It grows where round trips are long.
OBJECT_MEMORY_FRACTION = 0.3  # Of RAM, for objects on one host, unless --object-memory says otherwise.
STORE_WAIT_SECONDS = 5.0  # How long a new object waits for running tasks to let go of others before it is refused.
FREE_SEGMENTS_SECONDS = 10.0  # Freed segments that nobody has used for so long go back to the system.
FREE_SEGMENTS_FRACTION = (
    0.5  # Of the memory limit: freed segments kept for use again (their pages are there: ten times as fast).
)

# --- tasks
DEFAULT_RETRIES = 3
ELSEWHERE_LEAST_SECONDS = 1.0  # So long, at least, a task that failed on one worker waits for the others to have room.
ELSEWHERE_UNKNOWN_SECONDS = 10.0  # The same where nobody knows how long such tasks take.
BACKOFF_CAP_SECONDS = (
    60.0  # To which the pause between two attempts is doubled; what is down for longer will be down for longer still.
)
ATTEMPTS_KEPT = (
    50  # Failed ones that are told of a task, of any number of retries; each has up to STDERR_TAIL_BYTES of last words.
)
DISTRIBUTE_TIMEOUT_SECONDS = 300.0
PLACEMENT_TIMEOUT_SECONDS = 60.0
INFEASIBLE_NOTICE_SECONDS = 2.0  # Contract: reported within 5 s.
DEATH_GRACE_SECONDS = (
    0.3  # From a worker's broken connection to giving its tasks to others: a living agent is back within that, and ...
)
DEATH_GRACE_ROUND_TRIPS = 4  # ... so many round trips: TCP, the handshake, and who it is.
RESULT_GRACE_SECONDS = (
    15.0  # For a lost worker to come back with a result that was half way here; running its task again takes longer.
)
CLIENT_GRACE_SECONDS = (
    10.0  # From a client's broken connection to dropping its tasks; its own attempts are never further apart.
)
ABSENT_CLIENT_SECONDS = (
    60.0  # For a client that only workers tell of, after a restart: as long as clients look for a coordinator.
)
RECOVERY_SECONDS = (
    10.0  # After a restart: how long tasks that may still run somewhere wait for the workers of before to say so.
)
WORKER_TTL_SECONDS = 300.0  # How long a lost worker is shown.
LOST_WORKERS_SHOWN = 1000
EXPIRED_CLIENTS_KNOWN = 10_000  # Clients that are gone, remembered in case they come back.
ACKNOWLEDGED_RESULTS = 512  # A client confirms what it has received when it is this many, or when it sends something else.
MAX_PENDING_TASKS_PER_CLIENT = 5_000_000

# --- scheduling
AHEAD_ROUND_TRIPS = 1.5  # Tasks sent ahead of need: this many round trips' worth of work.
AHEAD_NEGLIGIBLE = 0.02  # A round trip below this fraction of a task needs no task ahead.
ROUND_TRIP_FLOOR_SECONDS = 0.001  # Two processes and a busy core between them.
ROUND_TRIP_CAP_SECONDS = 0.3  # Half around the world and back; a longer one is a busy machine rather than a long wire.
RECALL_AFTER_SECONDS = 0.05  # A task queued at one worker for so long while another idles is asked back.
MAX_AHEAD_TASKS = 1024  # Per worker; at 3 us a task this is 3 ms of work.
UNKNOWN_AHEAD_TASKS = 0  # Ahead of a function never measured: it might be long, and this machine slow.
TAIL_NEGLIGIBLE_SECONDS = 0.005  # Tasks this short go anywhere: choosing would gain no more than a few round trips.
MAX_COPIES = 2  # Of an idempotent task beside the first attempt (a third one gained nothing in simulation).
COPY_MARGIN = 0.1  # Of its own time by which a copy must be expected to end before the running attempts.
COPY_GAIN = (
    4.0  # Of the pool's time for what is done twice, by which a copy must end sooner: keeps work done for nothing under 1 %.
)
LOOK_AGAIN_FRACTION = 0.2  # Of a task's time: until the idle are asked again whether they want one of the last ones.
LOOK_AGAIN_GROWTH = 0.05  # Of the time for which nothing has changed: what has waited long can wait a little longer.
LOOK_AGAIN_LEAST_SECONDS = 0.002
LOOK_AGAIN_MOST_SECONDS = 1.0
LOOK_SHARE = 0.05  # Of the scheduler's time, at most, for looking through running attempts.
LOOK_SECONDS_PER_ATTEMPT = 2e-6  # What that costs here, about.
AGEING_SECONDS = 60.0  # A waiting task gains one step of priority in so long: low ones get through in the end.

# --- events
EVENTS_KEPT = 1000  # In a coordinator's memory and in its journal: a page or two for people, half a megabyte.
EVENT_BURST = 100  # Of one kind at once; a machine with hundreds of tasks may die, and a stranger may knock all day.
EVENTS_PER_SECOND = 2.0  # Of one kind, beyond that.
EVENT_TEXT_CHARACTERS = 400  # Of one; what a worker says of its own death can be long.
FACTS_CHARACTERS = 1000  # Of each name and reason that a worker tells of itself; they stand in logs and tables.
FACTS_ITEMS = 1024  # Devices, tags, packages of one worker, each: ten times what any machine has.
EVENT_POLL_SECONDS = 0.5  # `gpumesh events --follow`, `logs --follow`: what a person takes for at once.

# --- worker agent and runners
FEED_SECONDS = 0.002  # A runner is fed this much work at once: hides a 60 us hand-over.
FEED_MAX_TASKS = 256
FEED_ONE_AHEAD_SECONDS = 0.1  # Up to this length one task waits in the runner: a hand-over costs up to 1 % of it.
FEED_STUCK_SECONDS = 0.02  # A fed task running longer than this gives the ones behind it back.
REVOKE_SETTLE_SECONDS = 0.01  # After raising the revoke mark; far above any store-buffer delay.
RESULT_FLUSH_SECONDS = 0.0005  # A runner holds finished results of short tasks this long at most.
CANCEL_GRACE_SECONDS = 1.0  # From the interrupt to the kill.
DRAIN_SECONDS = 30.0
KIND_PATIENCE_SECONDS = (
    1.0  # So long a task waits for a busy process of its kind, or is overtaken: what another, warm one costs.
)
RUNNER_START_SECONDS = 60.0
RUNNER_RESTART_DELAYS_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
CRASH_RESTART_DELAYS_SECONDS = (0.0, 0.0, 0.1, 0.2, 0.5)  # After so many early deaths in a row; two starts a second are cheap.
EARLY_DEATH_SECONDS = 1.0  # From the first task that a process got to its death of it; one that did more is no loop.
STDERR_TAIL_BYTES = 4 * KIB
STDERR_TAIL_LINES = 20
OUTPUT_READ_BYTES = 64 * KIB
ORPHAN_SECONDS = 5.0

# --- environments
ENVIRONMENT_BUILD_SECONDS = 900.0  # One that takes longer to install than that hangs, or is better prepared by hand.
ENVIRONMENT_RETRY_SECONDS = 60.0  # Tasks that come this soon after a failed build fail with its error; later ones try again.
ENVIRONMENT_IDLE_SECONDS = 300.0  # Without tasks, before an environment's processes end; the environment itself stays on disk.

# --- code that travels
MAX_CODE_BYTES = 50_000_000  # Modules and files of one function: source is far below, so more is data or a build by mistake.
CODE_CHECK_SHARE = 0.03  # Of the time, at most, for looking whether a file was edited ...
CODE_CHECK_BURST_SECONDS = 0.005  # ... but for so much at once: whoever edits between two calls is never overlooked.
CODE_CACHE_ENTRIES = 20  # Folders of unpacked code kept on a worker; least recently used go.
CODE_CACHE_BYTES = 1 * GIB  # Together, at most.

# --- scripts
SCRIPT_RESULT_BYTES = 16 * MIB  # The last line of a script's output; it is held in memory, here and in the journal.
SCRIPT_OUTPUT_BURST_BYTES = 1 * MIB  # Of one stream that go on at once: more than anybody reads.
SCRIPT_OUTPUT_RATE_BYTES = 128 * KIB  # A second, after that: a thousand lines. What is beyond is left out.
SCRIPT_OUTPUT_TAIL_BYTES = 64 * KIB  # The end of what was held back is told, however much that was.
SCRIPT_GATHER_SECONDS = (
    0.02  # What is written in this time goes on together: nobody sees the difference, and a line is one message.
)
SCRIPT_INTERRUPT_SECONDS = 0.4  # From SIGINT to SIGTERM, for what ignores the one.
SCRIPT_GRACE_SECONDS = 0.8  # From SIGINT to SIGKILL: less than CANCEL_GRACE_SECONDS, so that the runner lives on.
SCRIPT_EXIT_CHECK_SECONDS = 0.02  # Where the system does not tell of the end of a process.

# --- streams
STREAM_WINDOW_ITEMS = 8192  # Items read from an input ahead of the results taken from the stream.
STREAM_WINDOW_BYTES = 64 * MIB

# --- script jobs
JOB_WINDOW_TASKS = 10_000  # Of all jobs together, with the scheduler at a time; the others wait in the journal.
JOB_WINDOW_BYTES = 64 * MIB  # Of their payloads.
JOB_LEAST_SHARE_TASKS = 64  # Of the window, for one job among many.
JOB_ONCE_TASKS = (
    16  # Of one job that may run at most once, at least: so many are lost with a coordinator whose workers do not come back.
)
JOB_ONCE_TASKS_PER_SLOT = (
    2  # ... or so many for each task that can run at once: hides that each is written down before it runs.
)
JOB_PART_TASKS = 1024  # Payloads sent and journaled as one: hides a round trip and a disk's flush.
JOB_PART_BYTES = 1 * MIB
JOB_PARTS_AHEAD = 4  # Sent before the first of them is on disk: keeps link and disk busy, and bounds what waits for the disk.
MAX_JOB_PAYLOAD_BYTES = 8 * MIB  # Of one task, as JSON; larger data belongs into files.
MAX_JOB_VARIANTS = 1000  # Different requirements and costs in one job: each is a queue of its own for the scheduler.
JOB_PAGE_TASKS = 2000  # Of a job's tasks in one answer.
JOB_PAGE_BYTES = 2 * MIB
JOB_WAIT_SECONDS = 20.0  # A question for news of a job is answered by then, news or not.
JOB_NEWS_SECONDS = 0.2  # At least between two answers about a job that goes on: who watches does not slow it down.
KEEP_JOBS_DAYS = 30.0  # Finished jobs; older ones are removed from the database.

# --- the journal
JOURNAL_GAP_SECONDS = 0.002  # Between two commits: what comes meanwhile is one transaction, and one flush of the disk.
JOURNAL_LINGER_SECONDS = 0.2  # Output and events wait so long for company: nobody is told when they are on disk.
JOURNAL_QUEUE_BYTES = 256 * MIB  # Waiting to be written; above it new jobs are refused, above half of it output is dropped.
JOURNAL_GROUP_BYTES = (
    32 * MIB
)  # One transaction, about: what a full disk or a killed coordinator undoes, and what others wait for.
JOURNAL_RETRY_SECONDS = 1.0  # After a failed commit: how long a disk with room again goes unnoticed.
JOURNAL_BUSY_SECONDS = 2.0  # For another program's lock on the database to go.
JOURNAL_LOCK_SECONDS = 2.0  # For a coordinator that is just ending, or a reader's copy.
JOURNAL_CHECK_BYTES = 64 * MIB  # A database up to this size is looked through at the start, 0.1 s or so.
JOURNAL_CHECKPOINT_BYTES = 4 * MIB  # Written before the log is moved into the database: it is read through after a crash.
JOURNAL_TASK_LOG_BYTES = 256 * KIB  # Of one task's output, the last: some thousand lines.
JOURNAL_LOG_BYTES = 256 * MIB  # Of all tasks' output together; the oldest goes.
JOURNAL_PRUNE_SECONDS = 3600.0  # Between two looks for jobs that are old enough to go.
JOURNAL_SWEEP_ROWS = 2000  # Deleted in one transaction: some milliseconds.
JOURNAL_CODE_SECONDS = 3600.0  # So long a folder that no job needs stays, for the next submission of the same script.
MEMORY_JOURNAL_BYTES = 256 * MIB  # Of an embedded mesh: payloads, results, output and code of its jobs.
MEMORY_JOURNAL_JOBS = 1000  # Finished ones of an embedded mesh; the oldest goes.

# --- actors, and work inside work
MAX_NESTING_DEPTH = 32  # Tasks inside tasks: each level that waits keeps a process, so recursion must end before memory does.
NESTED_ASK_SECONDS = (
    10.0  # For an answer of the coordinator to a task, which goes on without it then; it is one round trip away.
)
NESTED_OBJECTS_SECONDS = 2.0  # For what a task has put to be known there; if it takes longer it has been deleted, most likely.
MAX_WAITING_PER_SLOT = (
    32  # Tasks of one worker that have given their slot away, for each slot: a process of 10 MB or more each.
)
WAIT_SETTLE_SECONDS = 0.002  # A slot is kept so long, before something else begins there, for what a task waits for, or for a task that has waited.
SPARE_RUNNER_SECONDS = (
    10.0  # A process beyond the slots that nobody has used for so long ends: the next task that waits may come soon.
)
SPARE_RUNNERS_PER_SLOT = 2  # Of these, kept for each slot, ...
SPARE_RUNNERS_LEAST = 4  # ... and on any worker: for tasks in tasks in tasks.
DEPTH_PRIORITY = 1 << 40  # One level of nesting against `priority`: whoever waits for a task inside keeps a process.
MAX_ACTORS_PER_WORKER = 1000  # Processes of actors beside what GPUs have room for: against loops that create them without end.
MAILBOX_CALLS = 10_000  # That one client may have pending at one actor, if `mailbox` does not say: each keeps its arguments.
CALL_TIMEOUT_SECONDS = (
    60.0  # For room in such a mailbox; one that is full for as long as an actor may take to come about is no burst.
)
ACTOR_WINDOW_CALLS = 256  # Sent to an actor's process ahead of their results: hides the round trip to it many times.
ACTOR_CLOSE_SECONDS = 5.0  # From asking an actor to end, which runs its `close` or `__exit__`, to killing its process.
DEAD_ACTORS_KNOWN = 10_000  # Actors that are gone, and of whom a caller is still told why.
GENERATOR_WINDOW_ITEMS = (
    256  # Values of a generator under way before its consumer takes them: hides the round trip, and 64 travel together.
)
GENERATOR_WINDOW_BYTES = 1 * MIB  # The same in bytes: of larger values fewer are under way, but two at least.
GENERATOR_GATHER_SECONDS = 0.001  # Values that a generator yields in so quick succession travel together.

# --- tokens
MIN_TOKEN_CHARACTERS = 16  # Of a token that a person has chosen, before it is called short: what is shorter is found by trying.
TOKEN_GRACE_SECONDS = 3600.0  # After `gpumesh token rotate`, the token of before still lets in who has lost its connection.

# --- strangers at the door
FAILED_PROOFS = (
    5  # Wrong tokens of one address before it has to wait: a person mistypes twice, a script of theirs reconnects a few times.
)
FAILED_PROOFS_SECONDS = 10.0  # Within this time.
FAILED_PROOFS_MAX_SECONDS = 60.0  # The longest wait; an honest neighbour behind the same router waits no longer.
FAILED_PROOFS_LOCAL_SECONDS = 1.0  # The same for this machine itself, whose own worker calls from the same address.
KNOWN_STRANGERS = 1024  # Addresses remembered for that, and for not saying the same again.
REFUSALS_LOGGED_SECONDS = 60.0  # The same refusal of the same address is logged once in this time,
REFUSALS_LOGGED = 5  # and of one address no more than so many in it: what a stranger sends can make each another.
CROWDED_SECONDS = (
    0.25  # Who has come, or got through TLS, so lately and has spoken is not sent away for another, who waits outside.
)
CROWDED_SILENT_SECONDS = 0.04  # The same for who has said nothing: its first bytes come right behind it, over any line.
ACCEPT_BATCH = 64  # Connections taken from the system's queue in one round of the loop.
ACCEPT_PAUSE_SECONDS = 0.2  # Without descriptors for more connections: before the next look whether there are any.

# --- HTTP, and the mesh inside it
HTTP_HEAD_BYTES = 16 * KIB  # Of a request's first lines; browsers send 2 KiB.
HTTP_SECONDS = 60.0  # One connection that asks and is no WebSocket: a page, or a few figures, over the slowest link.
WEBSOCKET_READ_BYTES = 256 * KIB  # Of the mesh's bytes in one message; proxies hold a few of them.
WEBSOCKET_MESSAGE_BYTES = 1 * MIB  # The largest message taken in: proxies may join what they pass on.
WEBSOCKET_IDLE_SECONDS = 0.5  # Of a client's thread for pipes after the last one: connections take a moment to close.
HTTP_IDLE_SECONDS = (
    30.0  # Between two requests of one connection: two rounds of a usual scraper, whose connection is kept then.
)
HTTP_LINE_BYTES = 4 * KIB  # A request's first line, and each of its headers.
HTTP_FIGURES_SECONDS = 0.5  # Figures are not taken more often, however many ask.

# --- finding a mesh
FIND_SECONDS = 3.0  # Without an address, so long meshes are looked for; an answer takes 0.3 s on a quiet network.
FIND_SETTLE_SECONDS = 0.4  # After the first that answers, for others: whoever announces later than that is on a slower network.
FIND_ALL_SECONDS = (
    1.5  # The same where a person says which is meant: who has just answered another machine does so again after 1 s.
)
FIND_PROBE_SECONDS = 2.0  # For who answers at an announced address; what it is worth waiting for beside those that do.
FIND_AGAIN_SECONDS = 5.0  # Until such an address is looked at again.
ANNOUNCE_CHECK_SECONDS = 2.0  # Until an announcement follows a change of this machine's addresses.
QUICK_BENCHMARK_SECONDS = (
    3.0  # From its start, `gpumesh quickjoin` waits so long for the processor's figures; the worker goes on measuring.
)

# --- looking for what is wrong
DOCTOR_STEP_SECONDS = 4.0  # One step on the way to a mesh; what answers later than that is of no use to work with.
OCCUPANT_SECONDS = 1.5  # For who has a port of this machine to say what it is.
OWN_ADDRESS_SECONDS = 1.0  # For a coordinator to reach itself at an address that it is about to tell others.
CLOCK_NOTE_SECONDS = 5.0  # Clocks that differ by more are mentioned; nothing depends on them.
TUNNEL_START_SECONDS = 30.0  # For a tunnel to open: its program starts, logs in, and is given an address.
TUNNEL_CHECK_SECONDS = 10.0  # For the mesh to answer through it.
TUNNEL_END_SECONDS = 3.0  # For it to close before it is killed.

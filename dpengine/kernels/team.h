/* A team of threads: GOMP_parallel of the OpenMP library that torch has loaded. New threads would compete with those of
   torch, which spin for a while after their work. */
typedef void (*team)(void (*)(void *), void *, unsigned, unsigned);

/* Runs `worker` in all threads of the team, or in this thread if there is no team. It processes chunks of `job` until
   none is left. */
static inline void run_in_team(void (*worker)(void *), void *job, unsigned threads, team run) {
    if (run && threads > 1)
        run(worker, job, threads, 0);
    else
        worker(job);
}

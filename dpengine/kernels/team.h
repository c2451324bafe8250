/* A team of threads: GOMP_parallel of the OpenMP library that torch has loaded. Other threads would compete with those
   of torch, which spin for a while when their work is done. */
typedef void (*team)(void (*)(void *), void *, unsigned, unsigned);

/* Runs `share`, which takes work from `job` until none is left, in all threads; in this thread if there is no team. */
static inline void share_out(void (*share)(void *), void *job, unsigned threads, team run) {
    if (run && threads > 1)
        run(share, job, threads, 0);
    else
        share(job);
}

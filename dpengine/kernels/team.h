/* A team of threads: OpenMP's GOMP_parallel of the library that torch has loaded. Threads of our own would have to wait
   for those, which spin for a while when their work is done. */
typedef void (*team)(void (*)(void *), void *, unsigned, unsigned);

/* `share` takes work from `job` until none is left, in as many threads as there are, or here if there is no team. */
static inline void share_out(void (*share)(void *), void *job, unsigned threads, team run) {
    if (run && threads > 1)
        run(share, job, threads, 0);
    else
        share(job);
}

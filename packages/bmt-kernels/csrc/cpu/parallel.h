// Work on several threads: those of OpenMP, which torch uses too.
//
// [Note: the threads of OpenMP]
// Threads of OpenMP that have nothing to do keep a core busy for some milliseconds, in case more comes. A pool of our own would
// compete with torch's threads after each of its operations (measured on two cores: a step of Adam at two thirds of its
// speed). The module therefore uses OpenMP, and where torch brings the library along, it is the same copy.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace bmt {

// Calls task(i) once for each i below count, on up to `threads` threads, and returns when all are done. Each thread begins with
// its own contiguous share, for memory that it touched before, and then helps the others. `task` must not throw.
template <class Task>
void parallel(std::size_t threads, std::size_t count, const Task& task) {
    threads = std::max<std::size_t>(1, std::min(threads, count));
#if defined(_OPENMP)
    if (threads > 1) {
        struct alignas(64) Share {
            std::atomic<std::size_t> next{0};
            std::size_t end = 0;
        };
        std::vector<Share> shares(threads);
        for (std::size_t t = 0; t < threads; ++t) {
            shares[t].next = count * t / threads;
            shares[t].end = count * (t + 1) / threads;
        }
#pragma omp parallel num_threads(static_cast<int>(threads))
        {
            const auto own = static_cast<std::size_t>(omp_get_thread_num());
            for (std::size_t offset = 0; offset < threads; ++offset) {
                Share& share = shares[(own + offset) % threads];
                for (std::size_t i = share.next.fetch_add(1); i < share.end; i = share.next.fetch_add(1)) {
                    task(i);
                }
            }
        }
        return;
    }
#endif
    for (std::size_t i = 0; i < count; ++i) {
        task(i);
    }
}

}  // namespace bmt

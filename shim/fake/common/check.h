/* check.h - how functions of both libraries give up; a success is 0 in either. */
#ifndef TANGRAM_FAKE_CHECK_H
#define TANGRAM_FAKE_CHECK_H

#define EXPORT __attribute__((visibility("default")))
/* Another name of an exported function that stands above it. */
#define ALIAS(name, function) EXPORT extern __typeof__(function) name __attribute__((alias(#function)));
#define TRY(call)                                                                                                              \
    do {                                                                                                                       \
        const __typeof__(call) tried_ = (call);                                                                                \
        if (tried_ != 0)                                                                                                       \
            return tried_;                                                                                                     \
    } while (0)
#define CHECK(condition, otherwise)                                                                                            \
    do {                                                                                                                       \
        if (!(condition))                                                                                                      \
            return otherwise;                                                                                                  \
    } while (0)

#endif

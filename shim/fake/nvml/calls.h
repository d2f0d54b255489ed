/* calls.h - what a row of a table of functions means, in terms of `to`, the struct target of its handle (internal.h).
 *
 *   CALL(function, parameters, find, valid, supported, call)       what the call answers
 *   QUERY(function, parameters, find, valid, supported, value)        `answer` is the last parameter. find: what must succeed first: ON(which handles
 *                                                                   it takes, of enum accepted), both(...) of two GPUs, `to` and `with`, or ready()
 *   GET(function, type, accepted, value)                            (device, type *answer)
 *   VERSIONED(function, parameters, version, accepted, valid, supported, value)   a structure whose caller fills in its version
 *   PAIR(function, type, accepted, supported, first, second)        two answers of one type
 *   TEXT(function, parameters, find, format...)                     (..., char *answer, unsigned capacity)
 *   FIND(function, parameters, find, valid, unit)                   the handle of a unit; NOBODY: not found
 *   BITS(function, parameters, valid, first, count)                 a set with that many bits from the first on
 *   PROCESSES(function, type, which)                                processes on it, of enum listed
 *
 * An answer that is not `supported` is NVML_ERROR_NOT_SUPPORTED, one that is not `valid` NVML_ERROR_INVALID_ARGUMENT. */
#ifndef TANGRAM_FAKE_NVML_CALLS_H
#define TANGRAM_FAKE_NVML_CALLS_H

#define FUNCTION(function, parameters, find, valid, supported, ...)                                                            \
    EXPORT nvmlReturn_t function parameters                                                                                    \
    {                                                                                                                          \
        struct target to = {0}, with = {0};                                                                                    \
        (void)to, (void)with;                                                                                                  \
        TRY(find);                                                                                                             \
        hang(#function);                                                                                                       \
        CHECK(valid, NVML_ERROR_INVALID_ARGUMENT);                                                                             \
        CHECK(supported, NVML_ERROR_NOT_SUPPORTED);                                                                            \
        __VA_ARGS__;                                                                                                           \
        return NVML_SUCCESS;                                                                                                   \
    }
#define ON(accepted) target_of(device, accepted, &to)
#define CALL(function, parameters, find, valid, supported, ...) FUNCTION(function, parameters, find, valid, supported, TRY(__VA_ARGS__))
#define QUERY(function, parameters, find, valid, supported, value)                                                            \
    FUNCTION(function, parameters, find, answer != NULL && (valid), supported, *answer = value)
#define GET(function, type, accepted, value) QUERY(function, (nvmlDevice_t device, type * answer), ON(accepted), true, true, (type)(value))
#define PAIR(function, type, accepted, supported, first_value, second_value)                                                    \
    FUNCTION(function, (nvmlDevice_t device, type * first, type * second), ON(accepted), first != NULL && second != NULL, supported, \
             *first = (type)(first_value);                                                                                      \
             *second = (type)(second_value))
#define VERSIONED(function, parameters, number, accepted, valid, supported, value)                                              \
    FUNCTION(function, parameters, ON(accepted), answer != NULL && (valid), supported,                                          \
             const unsigned version = answer->version;                                                                          \
             CHECK(version == (sizeof *answer | number##u << 24), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);                        \
             *answer = value;                                                                                                   \
             answer->version = version)
#define TEXT(function, parameters, find, ...) FUNCTION(function, parameters, find, true, true, TRY(put_text(answer, capacity, __VA_ARGS__)))
#define FIND(function, parameters, find, valid, found)                                                                          \
    FUNCTION(function, parameters, find, answer != NULL && (valid), true,                                                       \
             const int unit = found;                                                                                            \
             CHECK(unit != NOBODY, NVML_ERROR_NOT_FOUND);                                                                       \
             *answer = handle_of((uint32_t)unit))
#define BITS(function, parameters, valid, first, count)                                                                         \
    FUNCTION(function, parameters, ON(ANY), set != NULL && words > 0 && (valid), true,                                          \
             set_bits(words, set, (unsigned long)(first), (unsigned long)(count)))
#define PROCESSES(function, type, which)                                                                                        \
    FUNCTION(function, (nvmlDevice_t device, unsigned *count, type *infos), ON(LIVE), count != NULL && (infos != NULL || *count == 0), true, \
             return list_processes(&to, which, count, infos, sizeof *infos))

#endif

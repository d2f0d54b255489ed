/* dlsym.c - the two functions of libc that the library replaces, so that a program that looks the driver up finds the hooks.
 *
 * RTLD_NEXT and RTLD_DEFAULT depend on the calling object: libc finds it by the return address. So whatever is
 * not ours is not called but jumped to, with the registers and the stack as they came; libc then sees the caller itself, and
 * a chain of interposers works as it does without us.
 *
 * An explicit handle is answered with a hook only when its symbol is the driver's function, not another interposer's. A newer form of
 * a function that we hook is the driver's own, as it is by cuGetProcAddress, and reported. The driver's functions have no versions, so
 * dlvsym finds them by any.
 */
#include "process.h"

#include <dlfcn.h>
#include <string.h>

struct route {
    void *to;     /* the answer, or the function to jump to */
    long answered;
};

typedef void *(*dlsym_function)(void *handle, const char *name);
typedef void *(*dlvsym_function)(void *handle, const char *name, const char *version);
dlsym_function real_dlsym_function(void);
dlvsym_function real_dlvsym_function(void);

__attribute__((used, visibility("hidden"))) struct route tangram_route(void *handle, const char *name);
__attribute__((used, visibility("hidden"))) struct route tangram_versioned_route(void *handle, const char *name, const char *version);

static bool may_be_ours(void *handle, const char *name)
{
    return name != NULL && handle != RTLD_NEXT && handle != RTLD_DEFAULT && (hook_for_name(name) != NULL || hook_is_newer_form(name));
}

static struct route answer(const char *name, void *found)
{
    struct route route = {found, 1};
    void *hook = hook_for_name(name);
    if (hook == NULL) {
        if (found != NULL && is_driver_symbol(found, "libcuda.so"))
            newer_form(name);
        return route;
    }
    const char *library = name[0] == 'n' ? "libnvidia-ml.so" : "libcuda.so";
    if (found != NULL && is_driver_symbol(found, library))
        route.to = hook;
    return route;
}

struct route tangram_route(void *handle, const char *name)
{
    dlsym_function real = real_dlsym_function();
    struct route route = {.answered = 0};
    memcpy(&route.to, &real, sizeof real);
    return real != NULL && may_be_ours(handle, name) ? answer(name, real(handle, name)) : route;
}

struct route tangram_versioned_route(void *handle, const char *name, const char *version)
{
    dlvsym_function real = real_dlvsym_function();
    struct route route = {.answered = 0};
    memcpy(&route.to, &real, sizeof real);
    return real != NULL && may_be_ours(handle, name) ? answer(name, real(handle, name, version)) : route;
}

/* A route comes back in the two registers of a result: rax and rdx, or x0 and x1. The begin of a function is where an indirect branch may end
 * (endbr64, bti c), for programs that have the processor check it. */
#if defined(__x86_64__)
#define REPLACED(name, route)                                                                                                  \
    __asm__(".text\n"                                                                                                          \
            ".globl " #name "\n"                                                                                               \
            ".type " #name ", @function\n"                                                                                     \
            ".p2align 4\n" #name ":\n"                                                                                         \
            "    .cfi_startproc\n"                                                                                             \
            "    endbr64\n"                                                                                                    \
            "    pushq %rdi\n"                                                                                                 \
            "    .cfi_adjust_cfa_offset 8\n"                                                                                   \
            "    pushq %rsi\n"                                                                                                 \
            "    .cfi_adjust_cfa_offset 8\n"                                                                                   \
            "    pushq %rdx\n"                                                                                                 \
            "    .cfi_adjust_cfa_offset 8\n"                                                                                   \
            "    call " #route "\n"                                                                                            \
            "    movq %rdx, %rcx\n"                                                                                            \
            "    popq %rdx\n"                                                                                                  \
            "    .cfi_adjust_cfa_offset -8\n"                                                                                  \
            "    popq %rsi\n"                                                                                                  \
            "    .cfi_adjust_cfa_offset -8\n"                                                                                  \
            "    popq %rdi\n"                                                                                                  \
            "    .cfi_adjust_cfa_offset -8\n"                                                                                  \
            "    testq %rcx, %rcx\n"                                                                                           \
            "    jnz 1f\n"                                                                                                     \
            "    testq %rax, %rax\n"                                                                                           \
            "    jz 1f\n"                                                                                                      \
            "    jmpq *%rax\n"                                                                                                 \
            "1:  ret\n"                                                                                                        \
            "    .cfi_endproc\n"                                                                                               \
            ".size " #name ", .-" #name "\n")
#elif defined(__aarch64__)
#define REPLACED(name, route)                                                                                                  \
    __asm__(".text\n"                                                                                                          \
            ".globl " #name "\n"                                                                                               \
            ".type " #name ", %function\n"                                                                                     \
            ".p2align 4\n" #name ":\n"                                                                                         \
            "    .cfi_startproc\n"                                                                                             \
            "    hint #34\n" /* bti c */                                                                                       \
            "    stp x29, x30, [sp, #-48]!\n"                                                                                  \
            "    .cfi_adjust_cfa_offset 48\n"                                                                                  \
            "    .cfi_rel_offset x29, 0\n"                                                                                     \
            "    .cfi_rel_offset x30, 8\n"                                                                                     \
            "    mov x29, sp\n"                                                                                                \
            "    stp x0, x1, [sp, #16]\n"                                                                                      \
            "    str x2, [sp, #32]\n"                                                                                          \
            "    bl " #route "\n"                                                                                              \
            "    mov x16, x0\n"                                                                                                \
            "    mov x17, x1\n"                                                                                                \
            "    ldp x0, x1, [sp, #16]\n"                                                                                      \
            "    ldr x2, [sp, #32]\n"                                                                                          \
            "    ldp x29, x30, [sp], #48\n"                                                                                    \
            "    .cfi_adjust_cfa_offset -48\n"                                                                                 \
            "    .cfi_restore x29\n"                                                                                           \
            "    .cfi_restore x30\n"                                                                                           \
            "    cbnz x17, 1f\n"                                                                                               \
            "    cbz x16, 1f\n"                                                                                                \
            "    br x16\n"                                                                                                     \
            "1:  mov x0, x16\n"                                                                                                \
            "    ret\n"                                                                                                        \
            "    .cfi_endproc\n"                                                                                               \
            ".size " #name ", .-" #name "\n")
#else
#error "dlsym.c: write the jump for this architecture"
#endif

REPLACED(dlsym, tangram_route);
REPLACED(dlvsym, tangram_versioned_route);

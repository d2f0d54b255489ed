/* dlsym.c - the one function of libc that the library replaces, so that a program that looks the driver up meets the hooks.
 *
 * RTLD_NEXT and RTLD_DEFAULT mean something only to the object that asks: libc tells it by the return address. So whatever is
 * not ours is not called but jumped to, with the registers and the stack as they came; libc then sees the caller itself, and
 * a chain of interposers works as it does without us.
 *
 * An explicit handle is answered with a hook only when what it holds is the driver's function, not another interposer's. A newer form of
 * a function that we hook is the driver's own, as it is by cuGetProcAddress, and reported.
 */
#include "process.h"

#include <dlfcn.h>
#include <string.h>

struct route {
    void *to;     /* the answer, or the function to jump to */
    long answered;
};

typedef void *(*dlsym_function)(void *handle, const char *name);
dlsym_function real_dlsym_function(void);

__attribute__((used, visibility("hidden"))) struct route tangram_route(void *handle, const char *name);

struct route tangram_route(void *handle, const char *name)
{
    dlsym_function real = real_dlsym_function();
    struct route route = {.answered = 0};
    memcpy(&route.to, &real, sizeof real);
    if (name == NULL || handle == RTLD_NEXT || handle == RTLD_DEFAULT || real == NULL)
        return route;
    void *hook = hook_for_name(name);
    const bool newer = hook == NULL && hook_is_newer_form(name);
    if (hook == NULL && !newer)
        return route;
    route.answered = 1;
    route.to = real(handle, name);
    if (newer) {
        if (route.to != NULL && is_driver_symbol(route.to, "libcuda.so"))
            newer_form(name);
        return route;
    }
    const char *library = name[0] == 'n' ? "libnvidia-ml.so" : "libcuda.so";
    if (route.to != NULL && is_driver_symbol(route.to, library))
        route.to = hook;
    return route;
}

#if !defined(__x86_64__)
#error "dlsym.c: write the jump for this architecture"
#endif
__asm__(".text\n"
        ".globl dlsym\n"
        ".type dlsym, @function\n"
        ".p2align 4\n"
        "dlsym:\n"
        "    .cfi_startproc\n"
        "    endbr64\n"
        "    pushq %rdi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    pushq %rsi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    subq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    call tangram_route\n"
        "    addq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rsi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rdi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    testq %rdx, %rdx\n"
        "    jnz 1f\n"
        "    testq %rax, %rax\n"
        "    jz 1f\n"
        "    jmpq *%rax\n"
        "1:  ret\n"
        "    .cfi_endproc\n"
        ".size dlsym, .-dlsym\n");

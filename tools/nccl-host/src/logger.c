/* The logger that a plugin gets from its host (`ncclDebugLogger_t`). It is variadic, which stable Rust can call but not
 * define: here the text is made, and `src/log.rs` keeps it. */
#include <stdarg.h>
#include <stdio.h>

void laxity_nccl_host_note(int level, const char *file, int line, const char *text);

__attribute__((format(printf, 5, 6))) void laxity_nccl_host_logger(int level, unsigned long subsystems,
                                                                   const char *file, int line,
                                                                   const char *format, ...)
{
    char text[1024];
    va_list arguments;

    (void)subsystems;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format ? format : "", arguments);
    va_end(arguments);
    laxity_nccl_host_note(level, file, line, text);
}

/* TLS of the stand-in engine and the load generator, compiled in with -DTLS. Without it everything is plain. */
#ifndef TLS_H
#define TLS_H
#include <errno.h>
#include <sys/socket.h>
#include <sys/types.h>

#ifdef TLS
#include <openssl/ssl.h>

static SSL_CTX *tls;

/* Read key and certificate of this end, and the authority of the other; exits if they cannot be used. */
static void tls_begin(const char *folder, int is_server)
{
    char path[1024];
    tls = SSL_CTX_new(is_server ? TLS_server_method() : TLS_client_method());
    SSL_CTX_set_mode(tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    if (!is_server)
        return;
    snprintf(path, sizeof path, "%s/identity.pem", folder);
    int is_well = SSL_CTX_use_certificate_chain_file(tls, path) && SSL_CTX_use_PrivateKey_file(tls, path, SSL_FILETYPE_PEM);
    snprintf(path, sizeof path, "%s/ca.pem", folder);
    if (!is_well || !SSL_CTX_load_verify_locations(tls, path, NULL)) {
        fprintf(stderr, "%s holds no identity\n", folder);
        exit(2);
    }
    SSL_CTX_set_verify(tls, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    SSL_CTX_set_num_tickets(tls, 0);
}

static SSL *tls_new(int fd, int is_server)
{
    SSL *ssl = SSL_new(tls);
    SSL_set_fd(ssl, fd);
    is_server ? SSL_set_accept_state(ssl) : SSL_set_connect_state(ssl);
    return ssl;
}

static ssize_t tls_result(SSL *ssl, int n)
{
    if (n > 0)
        return n;
    int error = SSL_get_error(ssl, n);
    if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) {
        errno = EAGAIN;
        return -1;
    }
    return 0;
}

static ssize_t get(SSL *ssl, int fd, void *to, size_t room)
{
    return ssl ? tls_result(ssl, SSL_read(ssl, to, (int)room)) : recv(fd, to, room, 0);
}

static ssize_t give(SSL *ssl, int fd, const void *from, size_t size)
{
    return ssl ? tls_result(ssl, SSL_write(ssl, from, (int)size)) : send(fd, from, size, 0);
}
#else
typedef void SSL;
static const int tls = 0;
static inline void tls_begin(const char *folder, int is_server) { (void)folder, (void)is_server; }
static inline SSL *tls_new(int fd, int is_server) { return (void)fd, (void)is_server, (SSL *)0; }
static inline void SSL_free(SSL *ssl) { (void)ssl; }
static inline int SSL_do_handshake(SSL *ssl) { return (void)ssl, 1; }
static inline ssize_t get(SSL *ssl, int fd, void *to, size_t room) { return (void)ssl, recv(fd, to, room, 0); }
static inline ssize_t give(SSL *ssl, int fd, const void *from, size_t size) { return (void)ssl, send(fd, from, size, 0); }
#endif
#endif

// Flooder plays clients that mean harm to one listener, for bench.floods.
//
//	flooder -address 127.0.0.1:8443 -tls -path /mutate -attack body -clients 50 -seconds 60
//	flooder -network unixpacket -address grants/a/arbiter.sock -first HELLO -packet USAGE -attack packets
//
// It prints how many connections were made and how many bytes were sent. The attack "burn" uses the same processors and makes no connection.
package main

import (
	"crypto/tls"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

var (
	network = flag.String("network", "tcp", "or unixpacket")
	address = flag.String("address", "", "host:port, or the socket's path")
	first   = flag.String("first", "", "packet in hexadecimal with which a connection begins")
	packet  = flag.String("packet", "", "packet in hexadecimal that is sent again and again")
	secure  = flag.Bool("tls", false, "speak TLS")
	path    = flag.String("path", "/metrics", "of complete requests")
	attack  = flag.String("attack", "burn", "what to do, see the source")
	clients = flag.Int("clients", 50, "at once")
	seconds = flag.Int("seconds", 60, "how long")
	size    = flag.Int("size", 8<<20, "bytes of a large body")

	connections, failures, sent atomic.Int64
	end                         time.Time
	zeros                       = make([]byte, 64<<10)
)

// Each client has an address of its own, as pods have.
func connect(client int) net.Conn {
	dialer := net.Dialer{Timeout: 2 * time.Second}
	if *network == "tcp" {
		dialer.LocalAddr = &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(1+client%250))}
	}
	conn, err := dialer.Dial(*network, *address)
	if err == nil && *secure {
		conn.SetDeadline(time.Now().Add(5 * time.Second))
		over := tls.Client(conn, &tls.Config{InsecureSkipVerify: true})
		if err = over.Handshake(); err != nil {
			conn.Close()
		}
		conn = over
	}
	if err != nil {
		failures.Add(1)
		time.Sleep(time.Millisecond)
		return nil
	}
	connections.Add(1)
	conn.SetDeadline(end)
	return conn
}

func write(conn net.Conn, data []byte) bool {
	n, err := conn.Write(data)
	sent.Add(int64(n))
	return err == nil
}

func alive() bool { return time.Now().Before(end) }

// once makes a connection and calls act with it until act answers false.
func once(client int, act func(net.Conn) bool) {
	conn := connect(client)
	if conn == nil {
		return
	}
	defer conn.Close()
	for alive() && act(conn) {
	}
}

func start(method string, length int) []byte {
	return []byte(fmt.Sprintf("%s %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", method, *path, length))
}

func bytesOf(text string) []byte {
	data, err := hex.DecodeString(text)
	if err != nil {
		panic(err)
	}
	return data
}

// quiet returns whether a connection is open: it reads what there is, and waits for nothing.
func quiet(conn net.Conn) bool {
	conn.SetReadDeadline(time.Now().Add(time.Millisecond))
	_, err := conn.Read(make([]byte, 64<<10))
	timeout, ok := err.(net.Error)
	return err == nil || ok && timeout.Timeout()
}

func drop(conn net.Conn) { go io.Copy(io.Discard, conn) }

// several keeps many connections of one client open and calls act on each cyclically; those that were closed are made again.
func several(client int, count int, first []byte, act func(net.Conn) bool, pause time.Duration) {
	open := make([]net.Conn, count)
	for alive() {
		for i, conn := range open {
			if conn == nil {
				if open[i] = connect(client); open[i] == nil {
					continue
				}
				if first != nil && !write(open[i], first) {
					open[i].Close()
					open[i] = nil
				}
			} else if !act(conn) {
				conn.Close()
				open[i] = nil
			}
		}
		time.Sleep(pause)
	}
}

func flood(client int) {
	switch *attack {
	case "burn":
		for x := 0; alive(); x++ {
		}
	case "connect": // and close
		once(client, func(net.Conn) bool { return false })
	case "silent": // many connections that send nothing, noticed only when they are closed
		several(client, 40, nil, func(conn net.Conn) bool {
			conn.SetReadDeadline(time.Now().Add(time.Millisecond))
			_, err := conn.Read(make([]byte, 1))
			timeout, ok := err.(net.Error)
			return ok && timeout.Timeout()
		}, 10*time.Millisecond)
	case "headers": // without end
		once(client, func(conn net.Conn) bool {
			drop(conn)
			if !write(conn, []byte("GET / HTTP/1.1\r\nHost: x\r\n")) {
				return false
			}
			lines := []byte{}
			for i := 0; i < 1000; i++ {
				lines = append(lines, fmt.Sprintf("X-%d: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n", i)...)
			}
			for alive() && write(conn, lines) {
			}
			return false
		})
	case "line": // a request line without end
		once(client, func(conn net.Conn) bool {
			drop(conn)
			if !write(conn, []byte("GET /")) {
				return false
			}
			letters := make([]byte, 64<<10)
			for i := range letters {
				letters[i] = 'a'
			}
			for alive() && write(conn, letters) {
			}
			return false
		})
	case "body": // of 200 MB
		once(client, func(conn net.Conn) bool {
			drop(conn)
			if !write(conn, start("POST", 200_000_000)) {
				return false
			}
			for i := 0; i < 200_000_000/len(zeros) && alive() && write(conn, zeros); i++ {
			}
			return false
		})
	case "chunks": // a body of unknown length, without end
		once(client, func(conn net.Conn) bool {
			drop(conn)
			if !write(conn, []byte("POST "+*path+" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")) {
				return false
			}
			piece := append(append([]byte(fmt.Sprintf("%x\r\n", len(zeros))), zeros...), '\r', '\n')
			for alive() && write(conn, piece) {
			}
			return false
		})
	case "large": // bodies that are just allowed, complete, and no JSON
		once(client, func(conn net.Conn) bool {
			drop(conn)
			if !write(conn, start("POST", *size)) {
				return false
			}
			for i := 0; i < *size/len(zeros); i++ {
				if !write(conn, zeros) {
					return false
				}
			}
			return true
		})
	case "slow": // bodies of which a byte comes now and then
		several(client, 40, start("POST", 100_000), func(conn net.Conn) bool { return write(conn, []byte{'a'}) }, 100*time.Millisecond)
	case "served": // many connections, each answered once and kept
		several(client, 40, start("GET", 0), func(conn net.Conn) bool {
			conn.SetReadDeadline(time.Now().Add(time.Millisecond))
			_, err := conn.Read(make([]byte, 64<<10))
			timeout, ok := err.(net.Error)
			return err == nil || ok && timeout.Timeout()
		}, 10*time.Millisecond)
	case "requests": // complete, one after the other
		once(client, func(conn net.Conn) bool {
			if !write(conn, start("GET", 0)) {
				return false
			}
			_, err := conn.Read(make([]byte, 64<<10))
			return err == nil
		})
	case "tokens": // complete requests, each with another token
		once(client, func(conn net.Conn) bool {
			token := sent.Load()
			if !write(conn, []byte(fmt.Sprintf("GET %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %d-%d\r\n\r\n", *path, client, token))) {
				return false
			}
			_, err := conn.Read(make([]byte, 64<<10))
			return err == nil
		})
	case "unread": // requests whose answers are not read
		several(client, 40, start("GET", 0), func(conn net.Conn) bool { return write(conn, start("GET", 0)) }, 50*time.Millisecond)
	case "greet": // one packet, its answer, and the next connection
		once(client, func(conn net.Conn) bool {
			if write(conn, bytesOf(*first)) {
				conn.Read(make([]byte, 64<<10))
			}
			return false
		})
	case "crowd": // 300 connections that stay, and others that come and go
		if client < 10 {
			several(client, 30, bytesOf(*first), quiet, 100*time.Millisecond)
		} else {
			once(client, func(conn net.Conn) bool {
				write(conn, bytesOf(*first))
				return false
			})
		}
	case "packets": // one after the other; answers are read
		body := bytesOf(*packet)
		once(client, func(conn net.Conn) bool {
			go io.Copy(io.Discard, conn)
			for ok := write(conn, bytesOf(*first)); ok && alive(); {
				ok = write(conn, body)
			}
			return false
		})
	case "questions": // many connections whose answers are not read
		body := bytesOf(*packet)
		several(client, 20, bytesOf(*first), func(conn net.Conn) bool { return write(conn, body) }, time.Millisecond)
	default:
		fmt.Fprintf(os.Stderr, "flooder: unknown attack %q\n", *attack)
		os.Exit(2)
	}
}

func main() {
	flag.Parse()
	end = time.Now().Add(time.Duration(*seconds) * time.Second)
	var all sync.WaitGroup
	for i := 0; i < *clients; i++ {
		all.Add(1)
		go func() {
			defer all.Done()
			for alive() {
				flood(i)
			}
		}()
	}
	all.Wait()
	fmt.Printf("%d %d %d\n", connections.Load(), failures.Load(), sent.Load())
}

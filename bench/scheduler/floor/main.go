// The least that an extender can do: it reads a filter call without a look at it, and answers with one node, each in its turn.
package main

import (
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"sync/atomic"
)

func main() {
	address := flag.String("address", "127.0.0.1:0", "where it listens")
	nodes := flag.Uint64("nodes", 1, "nodes are named node-00000 and so on")
	flag.Parse()
	var calls atomic.Uint64
	http.HandleFunc("/", func(answer http.ResponseWriter, request *http.Request) {
		if _, err := io.Copy(io.Discard, request.Body); err != nil {
			http.Error(answer, err.Error(), http.StatusBadRequest)
			return
		}
		answer.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(answer, `{"NodeNames":["node-%05d"]}`, (calls.Add(1)-1)%*nodes)
	})
	log.Fatal(http.ListenAndServe(*address, nil))
}

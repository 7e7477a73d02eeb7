package dispatch

import (
	"slices"
	"sync"
)

// maxFreed is the largest number of freed nodes that are listed. If there are more, items are tried on all nodes.
const maxFreed = 64

// freedNodes are nodes on which items may have got room. mu guards names. No other lock is taken while it is held.
type freedNodes struct {
	mu    sync.Mutex
	names []string
}

func (f *freedNodes) add(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.names) <= maxFreed && !slices.Contains(f.names, name) {
		f.names = append(f.names, name)
	}
}

// take removes and returns the nodes. tooMany is true if there are too many to list.
func (f *freedNodes) take() (names []string, tooMany bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	names, f.names = f.names, nil
	if len(names) > maxFreed {
		return nil, true
	}
	return names, false
}

package clustercache

import (
	"fmt"
	"sync"

	"github.com/gpushare/gpushare/pkg/eligibility"
)

// sharing lets the objects of the cache share equal values, because most pods differ in a few fields only.
type sharing struct {
	labels   shared[map[string]string]
	requests shared[eligibility.Amounts]
	// podStrings are namespaces, nodes and the like; nodeStrings are keys and values of labels.
	podStrings, nodeStrings shared[string]
}

// pod replaces parts of a new pod info by equal parts of earlier ones.
func (s *sharing) pod(p *PodInfo) {
	if p.Labels != nil {
		p.Labels = s.labels.one(fmt.Sprint(p.Labels), p.Labels)
	}
	p.Requests = s.requests.one(fmt.Sprint(p.Requests), p.Requests)
	texts := []*string{&p.Namespace, &p.Node, &p.NominatedNode, &p.RequestProblem}
	if m := p.Member; m != nil {
		m.Namespace, m.Name, m.UID = p.Namespace, p.Name, p.UID
		texts = append(texts, &m.Namespace, &m.Gang.Namespace, &m.Gang.Name, &m.PodGroup,
			&m.Controller, &m.Kind, &m.Template, &m.Shape, &m.Node, &m.Run, &m.Scheduler)
	}
	for _, text := range texts {
		*text = s.podStrings.one(*text, *text)
	}
}

// maxShared limits the values that shared remembers, and maxSharedSize the bytes of their keys. Most clusters have far fewer kinds of pods.
const maxShared, maxSharedSize = 4096, 1 << 20

// shared stores equal values once. Many objects share what it returns, so it must not be changed. mu guards values and size.
type shared[T any] struct {
	mu     sync.Mutex
	values map[string]T
	// size is the sum of the lengths of the keys.
	size int
}

// one returns the value that was first passed with the key.
func (s *shared[T]) one(key string, value T) T {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known, ok := s.values[key]; ok {
		return known
	}
	if s.values == nil || len(s.values) >= maxShared || s.size > maxSharedSize {
		s.values, s.size = map[string]T{}, 0 // The objects keep the values that they have.
	}
	s.values[key] = value
	s.size += len(key)
	return value
}

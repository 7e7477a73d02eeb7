package main

import (
	"fmt"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// book adds up the memory that bound pods have on each card. It gets every change of a pod in the API server's order, so it sees
// every state that existed. It shares no code with the simulation in pkg/scheduling: that one has a model of the API server, this one
// checks what a real one's pods say. It is not safe for concurrent use.
type book struct {
	// memory is that of each card, and cards the number of cards of each node.
	memory int64
	cards  int
	used   map[place]int64
	pods   map[types.UID]entry
}

// place is a card of a node.
type place struct {
	node string
	card int
}

// entry is what a pod has: the same memory on each of its cards.
type entry struct {
	places     []place
	memory     int64
	annotation string
	running    bool
}

func newBook(cards int, memory int64) *book {
	return &book{memory: memory, cards: cards, used: map[place]int64{}, pods: map[types.UID]entry{}}
}

// apply takes a pod's new state, or that it is deleted. It returns an error if a card of the pod has allocated more than its memory
// now, or if the pod is bound and has no card.
func (b *book) apply(pod *corev1.Pod, deleted bool) error {
	for _, p := range b.pods[pod.UID].places {
		b.used[p] -= b.pods[pod.UID].memory
	}
	delete(b.pods, pod.UID)
	memory := framework.GPUMemOf(pod)
	if deleted || memory == 0 || pod.Spec.NodeName == "" || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return nil
	}
	e := entry{annotation: pod.Annotations[protocol.AnnotationIndex], running: pod.Status.Phase == corev1.PodRunning}
	for text := range strings.SplitSeq(e.annotation, ",") {
		card, err := strconv.Atoi(text)
		if err != nil || card < 0 || card >= b.cards {
			return fmt.Errorf("pod %s is on node %s with cards %q", pod.Name, pod.Spec.NodeName, e.annotation)
		}
		e.places = append(e.places, place{pod.Spec.NodeName, card})
	}
	e.memory = memory / int64(len(e.places))
	b.pods[pod.UID] = e
	for _, p := range e.places {
		if b.used[p] += e.memory; b.used[p] > b.memory {
			return fmt.Errorf("card %d of node %s has allocated %d of %d with pod %s", p.card, p.node, b.used[p], b.memory, pod.Name)
		}
	}
	return nil
}

// total returns the memory that all pods have.
func (b *book) total() (sum int64) {
	for _, used := range b.used {
		sum += used
	}
	return sum
}

package nodee2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fakenvml"
)

// observed is a container of a test, by its own environment.
type observed struct {
	PodUID, Container string
	// ID is the container's ID in containerd, and Pid its process in the machine. Both are empty for a record of a start.
	ID  string
	Pid int
	Env map[string]string
}

func newObserved(environment []byte) (observed, bool) {
	env := map[string]string{}
	for variable := range strings.SplitSeq(string(environment), "\x00") {
		if name, value, ok := strings.Cut(variable, "="); ok {
			env[name] = value
		}
	}
	o := observed{PodUID: env["POD_UID"], Container: env["CONTAINER"], Env: env}
	return o, o.PodUID != "" && o.Container != ""
}

func (o observed) podUID() types.UID { return types.UID(o.PodUID) }

// cards returns the indexes of the container's cards. It returns an error if the variables of the environment disagree.
func (o observed) cards() ([]int, error) {
	cards, err := parseCards(o.Env[protocol.AnnotationIndex])
	if err != nil {
		return nil, fmt.Errorf("container %s has no card: %q", o.Container, o.Env[protocol.AnnotationIndex])
	}
	var uuids []string
	for _, card := range cards {
		uuids = append(uuids, cardUUID(card))
	}
	if visible := o.Env[protocol.EnvVisibleDevices]; visible != strings.Join(uuids, ",") {
		return nil, fmt.Errorf("container %s sees %s, which isn't card %s", o.Container, visible, o.Env[protocol.AnnotationIndex])
	}
	return cards, nil
}

// parseCards parses a list of different cards.
func parseCards(list string) (cards []int, err error) {
	for text := range strings.SplitSeq(list, ",") {
		card, err := strconv.Atoi(text)
		if err != nil || slices.Contains(cards, card) {
			return nil, fmt.Errorf("%q is no list of cards: %w", list, err)
		}
		cards = append(cards, card)
	}
	return cards, nil
}

// memory returns the container's GPU memory on each of its cards, in units; 0 for a container without a card.
func (o observed) memory() int64 {
	memory, _ := strconv.ParseInt(o.Env[protocol.EnvContainer], 10, 64)
	return memory
}

// cores returns the percentage of each of its cards that the container asks for.
func (o observed) cores() int64 {
	cores, _ := strconv.ParseInt(o.Env[protocol.EnvCores], 10, 64)
	return cores
}

// running returns the running containers, by the environment of their first process.
func (n *node) running() ([]observed, error) {
	files, err := filepath.Glob(n.machine.path("run/containerd/io.containerd.runtime.v2.task/k8s.io/*/init.pid"))
	if err != nil {
		return nil, err
	}
	var out []observed
	for _, file := range files {
		pid, err := os.ReadFile(file)
		if err != nil {
			continue // The process has ended in the meantime.
		}
		environment, err := os.ReadFile(n.machine.path("proc", string(pid), "environ"))
		if err != nil {
			continue
		}
		if o, ok := newObserved(environment); ok {
			o.ID = filepath.Base(filepath.Dir(file))
			o.Pid, _ = strconv.Atoi(string(pid))
			out = append(out, o)
		}
	}
	return out, nil
}

// find returns a running container.
func (n *node) find(pod types.UID, container string) (observed, error) {
	running, err := n.running()
	if err != nil {
		return observed{}, err
	}
	for _, o := range running {
		if o.podUID() == pod && o.Container == container {
			return o, nil
		}
	}
	return observed{}, fmt.Errorf("container %s of pod %s doesn't run", container, pod)
}

// processesOn returns the processes of these pods' containers, which use so many MiB of a card. Their IDs are those outside of the machine, where
// the device plugin runs.
func (n *node) processesOn(card int, pods []corev1.Pod, use map[string]int64) (processes []fakenvml.Process, err error) {
	files, err := filepath.Glob("/proc/[0-9]*/environ")
	for _, file := range files {
		environment, _ := os.ReadFile(file) // Empty if the process has ended.
		o, ok := newObserved(environment)
		i := slices.IndexFunc(pods, func(pod corev1.Pod) bool { return pod.UID == o.podUID() })
		if !ok || i < 0 {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			return nil, err
		}
		processes = append(processes, fakenvml.Process{Card: cardUUID(card), PID: pid, MiB: use[pods[i].Name]})
	}
	return processes, err
}

// kill kills the container's process.
func (n *node) kill(ctx context.Context, o observed) error {
	return n.machine.run(ctx, "kill", "-KILL", strconv.Itoa(o.Pid))
}

// starts returns one record for each start of a container, from the files that recordenv writes.
func (n *node) starts() ([]observed, error) {
	entries, err := os.ReadDir(n.recordsDir())
	if err != nil {
		return nil, err
	}
	var out []observed
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), ".") {
			continue // It isn't complete.
		}
		environment, err := os.ReadFile(filepath.Join(n.recordsDir(), entry.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if o, ok := newObserved(environment); ok {
			out = append(out, o)
		}
	}
	return out, nil
}

// containerOf identifies a container of a pod.
type containerOf struct{ pod, name string }

// restarts returns the containers that started more than once.
func restarts(starts []observed) (restarted []containerOf) {
	count := map[containerOf]int{}
	for _, o := range starts {
		count[containerOf{o.PodUID, o.Container}]++
	}
	for container, n := range count {
		if n > 1 {
			restarted = append(restarted, container)
		}
	}
	return restarted
}

package nodee2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/fakemps"
	"github.com/gpushare/gpushare/test/framework"
)

// mpsNode is a node in isolation mode mps. Only MPS and the driver are simulated: containers run the stub of a CUDA program, which finds
// its daemon by what the container was given. The journal of the stub shows what limit each program has.
type mpsNode struct {
	*node
	service    fakemps.Service
	directory  string
	supervisor *controlplane.Process
	// marked is the line of the journal from which the programs on a card count.
	marked map[string]int
}

// TestMPS: each container's programs have its limit, from the daemon of its card, while daemons and gpushare's programs end and start
// again.
func TestMPS(t *testing.T) {
	c := startCluster(t, cardMiB, cardMiB)
	m := startMPS(t, c)
	c.run(t, "each program has the limit of its container", func(s *scenario) {
		m.create(s, s.pod(8), s.pod(7), s.pod(6), s.pod(5).InitContainer("init", 1))
		m.waitPrograms(s)
	})
	c.run(t, "a daemon is killed", func(s *scenario) { m.testDaemonKilled(s) })
	c.run(t, "the device plugin is upgraded under running programs", func(s *scenario) {
		m.create(s, s.pod(5), s.pod(10))
		m.waitPrograms(s)
		stillRunning := s.expectRunning()
		check.Must(s, s.node.plugin.Restart(s.Context()))
		s.waitPlugin() // Until then kubelet and Node can show the state before the restart.
		s.waitCards(s)
		m.create(s, s.pod(6))
		m.waitPrograms(s)
		stillRunning()
	})
	c.run(t, "the pod of the daemons is replaced under running programs", func(s *scenario) { m.testReplaced(s) })
	lines, err := m.service.Journal()
	check.Must(t, err)
	for _, line := range lines {
		if line.Text == "runs unlimited" {
			t.Errorf("a program ran without a limit: %+v", line)
		}
	}
}

// startMPS starts the supervisor of the daemons in the machine, as its pod would, and has the plugin use them.
func startMPS(t *testing.T, c *cluster) *mpsNode {
	t.Helper()
	m := &mpsNode{node: c.node, directory: filepath.Join(c.node.machine.dir, "mps"), marked: map[string]int{}}
	stub := filepath.Join(c.node.machine.dir, "stub")
	check.Must(t, os.Mkdir(stub, 0o755))
	var err error
	m.service, err = fakemps.Build(stub)
	check.Must(t, err)
	plugin := c.Binary("gpushare-device-plugin")
	for range 2 { // The second time, as when the pod is replaced, it is there already.
		check.Must(t, c.node.machine.run(t.Context(), plugin, "mps", "--mps-pipe-directory="+m.directory, "--mount-shared-memory=16Mi"))
	}
	m.supervisor, err = c.node.machine.process("mps", plugin, "mps", "--mps-pipe-directory="+m.directory, "--mps-control="+m.service.Control,
		"--nvml-library="+c.Binary("fake-nvml/libnvidia-ml.so.1"), "--listen-address=")
	check.Must(t, err)
	m.supervisor.Env = append(c.node.driver.Env(), "FAKE_MPS="+m.service.Dir, "FAKE_MPS_SHM="+filepath.Join(m.directory, "shm"))
	check.Must(t, m.supervisor.Start(t.Context()))
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of %s:\n%s", m.supervisor.LogPath, m.supervisor.Tail(30))
		}
		check.Must(t, m.supervisor.Kill())
	})
	check.Must(t, c.node.restartPlugin(t.Context(), "--isolation=mps", "--mps-pipe-directory="+m.directory, "--usage-interval=200ms"))
	c.waitCards(t)
	m.waitReady(t, c)
	return m
}

// waitReady waits until new pods can be placed on all cards.
func (m *mpsNode) waitReady(t testing.TB, c *cluster) {
	t.Helper()
	framework.Eventually(t, "the cards are ready for MPS", func(ctx context.Context) error {
		node, err := c.Client.CoreV1().Nodes().Get(ctx, m.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		parsed := protocol.ParseNode(node)
		for _, card := range parsed.Cards {
			if card.Unhealthy != "" || card.MaxContainers != 16 || parsed.Isolation != "mps" {
				return fmt.Errorf("mode %q, card %+v", parsed.Isolation, card)
			}
		}
		return nil
	})
}

// create creates pods whose containers run the stub of a CUDA program.
func (m *mpsNode) create(s *scenario, pods ...*framework.PodWrapper) {
	s.Helper()
	if len(s.list()) == 0 {
		m.mark(s, 0, 1)
	}
	for _, pod := range pods {
		recordEnv(&pod.Spec)
		pod.Spec.HostNetwork = true
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "stub", VolumeSource: corev1.VolumeSource{
			HostPath: &corev1.HostPathVolumeSource{Path: m.machine.dir}}})
		for i := range pod.Spec.Containers {
			container := &pod.Spec.Containers[i]
			container.Args = []string{"-exec=" + m.service.Client}
			container.VolumeMounts = append(container.VolumeMounts, corev1.VolumeMount{Name: "stub", MountPath: m.machine.dir})
			for _, variable := range append(m.driver.Env(), "FAKE_MPS="+m.service.Dir) {
				name, value, _ := strings.Cut(variable, "=")
				container.Env = append(container.Env, corev1.EnvVar{Name: name, Value: value})
			}
		}
	}
	s.Create(pods...)
}

// mark forgets what the journal says about the programs on these cards.
func (m *mpsNode) mark(s *scenario, cards ...int) {
	s.Helper()
	lines, err := m.service.Journal()
	check.Must(s, err)
	for _, card := range cards {
		m.marked[cardUUID(card)] = len(lines)
	}
}

// program is what a program does on a card, such as "runs 2048M".
type program struct{ card, text string }

// waitPrograms waits until the pods run, and until a program has started for each of their containers since the mark, with the
// container's limit.
func (m *mpsNode) waitPrograms(s *scenario) {
	s.Helper()
	s.waitConsistent()
	s.Eventually("the programs have their limits", func(context.Context) error {
		lines, err := m.service.Journal()
		if err != nil {
			return err
		}
		started := map[program]int{}
		for i, line := range lines {
			if line.Program == "client" && i >= m.marked[line.Card] {
				started[program{line.Card, line.Text}]++
			}
		}
		running, err := s.node.running()
		for _, o := range running {
			if cards, err := o.cards(); err == nil {
				want := program{cardUUID(cards[0]), fmt.Sprintf("runs %dM", o.memory()*1024)}
				if started[want]--; started[want] < 0 {
					return fmt.Errorf("too few of %v in %v", want, lines)
				}
			}
		}
		return err
	})
}

// onCard returns the running containers of a card, by ID.
func (m *mpsNode) onCard(s *scenario, card int) (ids []string) {
	s.Helper()
	running, err := s.node.running()
	check.Must(s, err)
	for _, o := range running {
		if cards, err := o.cards(); err == nil && slices.Contains(cards, card) {
			ids = append(ids, o.ID)
		}
	}
	slices.Sort(ids)
	return ids
}

// testDaemonKilled: the containers of the daemon's card start again, with their limits. Those of the other card notice nothing.
func (m *mpsNode) testDaemonKilled(s *scenario) {
	m.create(s, s.pods(4, 5)...) // Three fill a card, in whatever order they come.
	m.waitPrograms(s)
	before, others := m.onCard(s, 0), m.onCard(s, 1)
	m.expectRestarts(s, 0)
	lines, err := m.service.Journal()
	check.Must(s, err)
	for _, line := range slices.Backward(lines) {
		if line.Program == "control" && line.Card == cardUUID(0) {
			check.Must(s, m.machine.run(s.Context(), "kill", "-KILL", strconv.Itoa(line.PID)))
			break
		}
	}
	m.waitRestarted(s, 0, before)
	m.waitPrograms(s)
	if diff := cmp.Diff(others, m.onCard(s, 1)); diff != "" || len(others) == 0 {
		s.Errorf("the containers of the other card (-before +after):\n%s", diff)
	}
}

// expectRestarts has the report expect that the containers of these cards are restarted.
func (m *mpsNode) expectRestarts(s *scenario, cards ...int) {
	s.Helper()
	m.mark(s, cards...)
	running, err := s.node.running()
	check.Must(s, err)
	for _, o := range running {
		if has, err := o.cards(); err == nil && slices.Contains(cards, has[0]) {
			s.killed[o.PodUID] = true
		}
	}
}

// waitRestarted waits until all containers of a card have been restarted.
func (m *mpsNode) waitRestarted(s *scenario, card int, before []string) {
	s.Helper()
	s.Eventually(fmt.Sprintf("the containers of card %d run again", card), func(context.Context) error {
		now := m.onCard(s, card)
		if len(now) != len(before) || slices.ContainsFunc(now, func(id string) bool { return slices.Contains(before, id) }) {
			return fmt.Errorf("before %q, now %q", before, now)
		}
		return nil
	})
}

// testReplaced: while there is no daemon, no program can use a card that containers have. A card without containers gets its compute mode
// back.
func (m *mpsNode) testReplaced(s *scenario) {
	m.create(s, s.pod(8), s.pod(7))
	m.waitPrograms(s)
	before := m.onCard(s, 0)
	if len(before) != 2 {
		s.Fatalf("card 0 has the containers %q", before)
	}
	m.expectRestarts(s, 0)
	check.Must(s, m.machine.run(s.Context(), "kill", "-TERM", m.pid(s)))
	<-m.supervisor.Exited()
	const modeDefault, modeProhibited = 0, 2 // NVML's numbers
	for card, want := range []int{modeProhibited, modeDefault} {
		if mode, err := m.driver.ComputeMode(cardUUID(card)); err != nil || mode != want {
			s.Errorf("card %d has the compute mode %d (%v), want %d", card, mode, err, want)
		}
	}
	check.Must(s, m.supervisor.Start(s.Context()))
	m.waitReady(s, s.cluster)
	s.waitHealth(0, true)
	s.waitCards(s) // The kubelet learns it a little later.
	m.waitRestarted(s, 0, before)
	m.waitPrograms(s)
}

// pid returns the supervisor's process ID in the machine.
func (m *mpsNode) pid(s *scenario) string {
	s.Helper()
	paths, err := filepath.Glob(m.machine.path("proc/[0-9]*/cmdline"))
	check.Must(s, err)
	program := s.Binary("gpushare-device-plugin") + "\x00mps\x00"
	for _, path := range paths {
		if command, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(command), program) {
			return filepath.Base(filepath.Dir(path))
		}
	}
	s.Fatal("the supervisor doesn't run")
	return ""
}

package kubeadm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// machine is a control-plane node whose kubelet is a fake: a scheduler runs with what the static pod says, at once, and
// one that is given a configuration with the word "broken" never gets healthy.
type machine struct {
	t *testing.T
	Options
	config string
}

func newMachine(t *testing.T, manifest string) *machine {
	t.Helper()
	dir := t.TempDir()
	m := &machine{t: t, config: filepath.Join(dir, "theirs.yaml")}
	m.Options = Options{
		Manifest: filepath.Join(dir, "manifests", "kube-scheduler.yaml"), Folder: filepath.Join(dir, "gpushare"),
		Timeout: 2 * time.Second, Settle: time.Millisecond, Out: t.Output(), Running: m.running,
	}
	if err := os.Mkdir(filepath.Dir(m.Manifest), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(m.Manifest, []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	return m
}

func (m *machine) running(_ context.Context, file string) (string, error) {
	data, err := os.ReadFile(m.Manifest)
	if err != nil {
		return "", err
	}
	pod, err := parse(data)
	if err != nil {
		return "", err
	}
	config, _ := pod.flag("--config")
	if config != file {
		return "", errors.New("another runs")
	}
	if config == "" {
		return "life", nil
	}
	text, err := os.ReadFile(config)
	if err == nil && strings.Contains(string(text), "broken") {
		err = errors.New("it crashes")
	}
	return "life", err
}

func (m *machine) manifest() string { return string(read(m.t, m.Manifest)) }

// left lists what lies beside the watched folder.
func (m *machine) left() []string {
	entries, _ := os.ReadDir(m.Folder)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func TestInstallAndUndo(t *testing.T) {
	ours := read(t, "../../config/scheduler-config.yaml")
	for _, name := range []string{"kubeadm", "bare"} {
		t.Run(name, func(t *testing.T) {
			before := string(read(t, filepath.Join("testdata", name+".yaml")))
			m := newMachine(t, before)
			if err := Install(t.Context(), m.Options, ours); err != nil {
				t.Fatal(err)
			}
			first := m.manifest()
			if first == before || len(m.left()) != 2 {
				t.Fatalf("installed: %v\n%s", m.left(), first)
			}
			if err := Install(t.Context(), m.Options, ours); err != nil || m.manifest() != first || len(m.left()) != 2 {
				t.Errorf("installed again: %v, %v\n%s", err, m.left(), cmp.Diff(first, m.manifest()))
			}
			changed := []byte(strings.Replace(string(ours), "weight: 100", "weight: 50", 1))
			if err := Install(t.Context(), m.Options, changed); err != nil || m.manifest() == first || len(m.left()) != 2 {
				t.Errorf("installed another one: %v, %v", err, m.left())
			}
			for range 2 {
				if err := Undo(t.Context(), m.Options); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(before, m.manifest()); diff != "" {
					t.Errorf("undone (-before +now):\n%s", diff)
				}
				if left := m.left(); left != nil {
					t.Errorf("left: %v", left)
				}
			}
			if entries, _ := os.ReadDir(filepath.Dir(m.Manifest)); len(entries) != 1 {
				t.Errorf("in the watched folder: %v", entries)
			}
		})
	}
}

func TestAConfigurationThatIsThereIsKept(t *testing.T) {
	before := string(read(t, "testdata/by-hand.yaml"))
	m := newMachine(t, before)
	host := filepath.Join(t.TempDir(), "kubernetes")
	if err := os.MkdirAll(filepath.Join(host, "scheduler"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(host, "scheduler", "config.yaml"), []byte(
		"apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nprofiles: [{schedulerName: mine}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	before = strings.Replace(before, "/srv/kubernetes", host, 1)
	if err := os.WriteFile(m.Manifest, []byte(before), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Install(t.Context(), m.Options, read(t, "../../config/scheduler-config.yaml")); err != nil {
		t.Fatal(err)
	}
	pod, err := parse([]byte(m.manifest()))
	if err != nil {
		t.Fatal(err)
	}
	file, _ := pod.flag("--config")
	if text := string(read(t, file)); !strings.Contains(text, "schedulerName: mine") || !strings.Contains(text, "bindVerb: bind") {
		t.Errorf("merged is\n%s", text)
	}
}

func TestASchedulerThatDoesNotComeBackIsRolledBack(t *testing.T) {
	before := string(read(t, "testdata/kubeadm.yaml"))
	ours := string(read(t, "../../config/scheduler-config.yaml"))
	broken := []byte(ours + "# broken\n")
	t.Run("at the first installation", func(t *testing.T) {
		m := newMachine(t, before)
		m.Timeout = time.Second
		if err := Install(t.Context(), m.Options, broken); !errors.Is(err, ErrRolledBack) || !strings.Contains(err.Error(), "it crashes") {
			t.Errorf("got %v", err)
		}
		if diff := cmp.Diff(before, m.manifest()); diff != "" {
			t.Errorf("(-before +now):\n%s", diff)
		}
	})
	t.Run("at a later one", func(t *testing.T) {
		m := newMachine(t, before)
		if err := Install(t.Context(), m.Options, []byte(ours)); err != nil {
			t.Fatal(err)
		}
		good := m.manifest()
		m.Timeout = time.Second
		if err := Install(t.Context(), m.Options, broken); !errors.Is(err, ErrRolledBack) {
			t.Errorf("got %v", err)
		}
		if !strings.Contains(fmt.Sprint(m.left()), "scheduler-config-") {
			t.Errorf("the configuration that it has again is gone: %v", m.left())
		}
		if diff := cmp.Diff(good, m.manifest()); diff != "" {
			t.Errorf("(-before +now):\n%s", diff)
		}
		if err := Undo(t.Context(), m.Options); err != nil || m.manifest() != before {
			t.Errorf("undone: %v", err)
		}
	})
	t.Run("when the first attempt was killed before it could", func(t *testing.T) {
		m := newMachine(t, before)
		running := m.Running
		ctx, kill := context.WithCancel(t.Context())
		m.Running = func(ctx context.Context, file string) (string, error) {
			kill() // The manifest is written. A kill would leave just this.
			panic("killed")
		}
		func() {
			defer func() { _ = recover() }()
			_ = Install(ctx, m.Options, broken)
		}()
		m.Running, m.Timeout = running, time.Second
		if err := Install(t.Context(), m.Options, broken); !errors.Is(err, ErrRolledBack) {
			t.Errorf("got %v", err)
		}
		if diff := cmp.Diff(before, m.manifest()); diff != "" {
			t.Errorf("(-before +now):\n%s", diff)
		}
	})
}

func TestWhatOthersEditedIsNotUndone(t *testing.T) {
	m := newMachine(t, string(read(t, "testdata/kubeadm.yaml")))
	ours := read(t, "../../config/scheduler-config.yaml")
	if err := Install(t.Context(), m.Options, ours); err != nil {
		t.Fatal(err)
	}
	edited := strings.Replace(m.manifest(), "v1.33.1", "v1.33.2", 1)
	if err := os.WriteFile(m.Manifest, []byte(edited), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{"install": Install(t.Context(), m.Options, ours), "undo": Undo(t.Context(), m.Options)} {
		if err == nil || !strings.Contains(err.Error(), "was edited after the installation") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if m.manifest() != edited {
		t.Error("it was changed all the same")
	}
	// kubeadm upgrade writes the file anew: installed again, undone it is the new one.
	upgraded := strings.Replace(string(read(t, "testdata/kubeadm.yaml")), "v1.33.1", "v1.34.0", 1)
	if err := os.WriteFile(m.Manifest, []byte(upgraded), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(Install(t.Context(), m.Options, ours), Undo(t.Context(), m.Options)); err != nil || m.manifest() != upgraded {
		t.Errorf("after an upgrade: %v", err)
	}
}

func TestTheBackupMayNotLieWhereTheKubeletLooks(t *testing.T) {
	m := newMachine(t, string(read(t, "testdata/kubeadm.yaml")))
	m.Folder = filepath.Dir(m.Manifest)
	if err := Install(t.Context(), m.Options, read(t, "../../config/scheduler-config.yaml")); err == nil {
		t.Error("it may")
	}
}

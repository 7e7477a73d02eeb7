// Package testbed is the whole product on one machine: a real control plane, the extender, and GPU nodes that are each
// a simulated kubelet with a real device plugin on a fake driver library. The tests and the demo run on it.
//
// The project's programs run as their manifests say: under the same ServiceAccounts, with the same rights, and
// kube-scheduler with the configuration that is shipped.
package testbed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpushare/gpushare/test/controlplane"
)

// Options say what to build. The zero value is a control plane with the extender and no nodes.
type Options struct {
	// Dir is where everything goes. It should be short: Unix sockets lie below it.
	Dir string
	// MemoryUnit is the device plugins' --memory-unit, MiB by default.
	MemoryUnit string
	// ExtenderArgs are flags to add.
	ExtenderArgs []string
	// Replicas is how many extenders run beside each other, with a leader; 0 for a single one without an election.
	Replicas int
	// ThroughProxy puts a proxy between the extender, or all of them, and the API server, so that a test can disturb it.
	ThroughProxy bool
	// Bare leaves the project out: nothing of it is applied or started.
	Bare bool
	// ControlPlane changes how the control plane runs; its folder and the extender's address are set here.
	ControlPlane controlplane.Options
}

// Bed is a running product.
type Bed struct {
	*controlplane.ControlPlane
	// Extender is the extender's process, ExtenderURL where it answers kube-scheduler, PageURL where it shows the page.
	Extender    *controlplane.Process
	ExtenderURL string
	PageURL     string
	// Replicas and ReplicaURLs are the extenders with Options.Replicas; Extender is nil then, and ExtenderURL leads to
	// the one that is published.
	Replicas    []*controlplane.Process
	ReplicaURLs []string
	// Proxy is nil without Options.ThroughProxy.
	Proxy *controlplane.Proxy

	options          Options
	root             string
	pluginKubeconfig string
	port, pagePort   *controlplane.Port
	replicaPorts     []*controlplane.Port
	service          *service
	nodes            []*Node
}

// Start builds a bed and returns when all of it is ready. ctx bounds the start alone.
func Start(ctx context.Context, o Options) (b *Bed, err error) {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return nil, err
	}
	if o.MemoryUnit == "" {
		o.MemoryUnit = "MiB"
	}
	port, err := controlplane.ReservePort()
	if err != nil {
		return nil, err
	}
	pagePort, err := controlplane.ReservePort()
	if err != nil {
		port.Release()
		return nil, err
	}
	b = &Bed{
		options: o, root: root, port: port, ExtenderURL: port.URL("http"), pagePort: pagePort, PageURL: pagePort.URL("http"),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Stop())
		}
	}()
	o.ControlPlane.Dir = filepath.Join(o.Dir, "control-plane")
	o.ControlPlane.Scheduler.ExtenderURL = b.ExtenderURL
	if b.ControlPlane, err = controlplane.Start(ctx, o.ControlPlane); err != nil {
		return nil, err
	}
	if o.Bare {
		return b, nil
	}
	if err = b.Apply(ctx, filepath.Join(root, "deploy", "manifests")); err != nil {
		return nil, err
	}
	if b.pluginKubeconfig, err = b.ServiceAccountKubeconfig(ctx, "kube-system", "gpushare-device-plugin"); err != nil {
		return nil, err
	}
	if o.Replicas > 0 {
		return b, b.startReplicas(ctx)
	}
	return b, b.startExtender(ctx)
}

func (b *Bed) startExtender(ctx context.Context) error {
	kubeconfig, err := b.ServiceAccountKubeconfig(ctx, "kube-system", "gpushare-extender")
	if err != nil {
		return err
	}
	if kubeconfig, err = b.throughProxy(kubeconfig); err != nil {
		return err
	}
	b.Extender = &controlplane.Process{
		Name: "gpushare-extender", Path: b.Binary("gpushare-extender"),
		Args: append([]string{
			"--kubeconfig=" + kubeconfig, "--listen-address=" + b.port.Address(), "--ui-listen-address=" + b.pagePort.Address(), "-v=2",
		}, b.options.ExtenderArgs...),
		LogPath: filepath.Join(b.options.Dir, "extender.log"),
		Ready:   controlplane.HTTPReady(b.ExtenderURL + "/readyz"),
	}
	return b.Extender.Start(ctx)
}

// throughProxy returns a kubeconfig that leads through a proxy where the options ask for one.
func (b *Bed) throughProxy(kubeconfig string) (string, error) {
	if !b.options.ThroughProxy {
		return kubeconfig, nil
	}
	var err error
	if b.Proxy, err = b.StartProxy(); err != nil {
		return "", err
	}
	return b.Proxy.Kubeconfig(kubeconfig)
}

// Stop ends everything that was started. What lies in Dir stays. Stopping twice is no error.
func (b *Bed) Stop() error {
	var errs []error
	for _, node := range b.nodes {
		errs = append(errs, node.Stop())
	}
	b.nodes = nil
	if b.Extender != nil {
		errs = append(errs, b.Extender.Kill())
	}
	if b.service != nil {
		errs = append(errs, b.service.close())
		b.service = nil
	}
	for _, replica := range b.Replicas {
		errs = append(errs, replica.Kill())
	}
	for _, port := range b.replicaPorts {
		port.Release()
	}
	b.replicaPorts = nil
	if b.Proxy != nil {
		errs = append(errs, b.Proxy.Close())
	}
	if b.ControlPlane != nil {
		errs = append(errs, b.ControlPlane.Stop())
	}
	if b.port != nil {
		b.port.Release()
		b.pagePort.Release()
		b.port = nil
	}
	return errors.Join(errs...)
}

// Processes returns every program that runs or has run.
func (b *Bed) Processes() []*controlplane.Process {
	processes := b.ControlPlane.Processes()
	if b.Extender != nil {
		processes = append(processes, b.Extender)
	}
	processes = append(processes, b.Replicas...)
	for _, node := range b.nodes {
		processes = append(processes, node.Plugin)
	}
	return processes
}

// Binary returns the path of one of the binaries in bin/.
func (b *Bed) Binary(name string) string { return filepath.Join(b.root, "bin", name) }

// StartForTest starts a bed for as long as the test runs. It skips the test, or fails it where
// controlplane.RequireEnv is set, if the programs that it runs haven't been built.
func StartForTest(t testing.TB, o Options) *Bed {
	t.Helper()
	if err := built(); err != nil {
		if os.Getenv(controlplane.RequireEnv) != "" {
			t.Fatal(err)
		}
		fmt.Fprintf(os.Stderr, "SKIPPED %s: %v\n", t.Name(), err)
		t.Skip(err)
	}
	// Not t.TempDir: its names are too long for a Unix socket, and after a failure the logs are wanted.
	dir, err := os.MkdirTemp("", "gpushare-")
	if err != nil {
		t.Fatal(err)
	}
	o.Dir = dir
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	b, err := Start(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range b.Processes() {
				t.Logf("the end of %s:\n%s", p.LogPath, p.Tail(15))
			}
			t.Logf("everything that was running left its logs in %s", dir)
		}
		if err := b.Stop(); err != nil {
			t.Error(err)
		}
		if !t.Failed() {
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		}
	})
	return b
}

// built returns an error that names what has not been built.
func built() error {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return err
	}
	if err := (controlplane.Options{}).Binaries(); err != nil {
		return err
	}
	for _, name := range []string{"gpushare-extender", "gpushare-device-plugin", "kubectl-inspect-gpushare", "fake-nvml/libnvidia-ml.so.1"} {
		if _, err := os.Stat(filepath.Join(root, "bin", name)); err != nil {
			return fmt.Errorf("bin/%s is missing: `make build fake-nvml` builds it", name)
		}
	}
	return nil
}

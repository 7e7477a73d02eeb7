package framework

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
)

// Options configure a Cluster. The zero value is a control plane with the extender and no nodes.
type Options struct {
	// Dir is the folder for all files. Its path should be short, because it contains Unix sockets.
	Dir string
	// MemoryUnit is the device plugins' --memory-unit; MiB by default.
	MemoryUnit string
	// ExtenderArgs are additional flags.
	ExtenderArgs []string
	// FairShare is the extenders' --fair-share, with the rights that it needs; if it is empty, fair sharing is off.
	FairShare string
	// NativeGroups turns PodGroups on: in the control plane, with the gates that they need, and in the extenders, with the rights.
	NativeGroups bool
	// Samples limits kube-scheduler to samples of 100 nodes, and gives the extender the right to nominate pods to others.
	Samples bool
	// Replicas is the number of extenders with leader election, or 0 for a single extender without it.
	Replicas int
	// ThroughProxy puts a proxy between the extenders and the API server, so that a test can inject faults.
	ThroughProxy bool
	// Bare runs only the control plane, and kube-scheduler without an extender: nothing of gpushare is applied or started.
	Bare bool
	// Guard installs the guard. The device plugins then have tokens that name their nodes.
	Guard bool
	// EarlierVersion starts the extenders of the earlier version in bin/former (`make test-upgrade`), with the manifests of that version.
	EarlierVersion bool
	// ControlPlane configures the control plane. Start sets its folder and the extender's address.
	ControlPlane controlplane.Options
}

// Cluster is a running cluster.
type Cluster struct {
	*controlplane.ControlPlane
	// Extender is the extender's process. It serves kube-scheduler at ExtenderURL and the web page at PageURL.
	Extender    *controlplane.Process
	ExtenderURL string
	PageURL     string
	// Replicas and ReplicaURLs are the extenders of Options.Replicas. Extender is nil then, and ExtenderURL is
	// forwarded to the leader.
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

// Start starts a Cluster and returns when all of it is ready. ctx bounds only the start.
func Start(ctx context.Context, o Options) (c *Cluster, err error) {
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
	c = &Cluster{
		options: o, root: root, port: port, ExtenderURL: port.URL("http"), pagePort: pagePort, PageURL: pagePort.URL("http"),
	}
	started := c // A return with an error sets c to nil.
	defer func() {
		if err != nil {
			err = errors.Join(err, started.Stop())
		}
	}()
	if o.NativeGroups {
		o.ControlPlane.ExtraArgs = controlplane.NativeGroups()
		c.options.ExtenderArgs = append([]string{"--native-groups"}, c.options.ExtenderArgs...)
	}
	if o.Samples {
		c.options.ExtenderArgs = append([]string{"--percentage-of-nodes-to-score=1"}, c.options.ExtenderArgs...)
		o.ControlPlane.Scheduler.Edits = append(o.ControlPlane.Scheduler.Edits, controlplane.NodesToScore(1))
		// Otherwise it tries rejected pods again at once if no others wait, with the next sample.
		o.ControlPlane.ExtraArgs = map[string][]string{"kube-scheduler": {"--feature-gates=SchedulerPopFromBackoffQ=false"}}
	}
	o.ControlPlane.Dir = filepath.Join(o.Dir, "control-plane")
	if !o.Bare {
		o.ControlPlane.Scheduler.ExtenderURL = c.ExtenderURL
	}
	if c.ControlPlane, err = controlplane.Start(ctx, o.ControlPlane); err != nil {
		return nil, err
	}
	if o.Bare {
		return c, nil
	}
	if err = c.Apply(ctx, c.Manifests("manifests", o.EarlierVersion)); err != nil {
		return nil, err
	}
	if o.FairShare != "" {
		c.options.ExtenderArgs = append([]string{"--fair-share=" + o.FairShare}, c.options.ExtenderArgs...)
		if err = c.AllowFairShare(ctx); err != nil {
			return nil, err
		}
	}
	if o.NativeGroups {
		if err = c.Apply(ctx, filepath.Join(root, "deploy", "native-groups")); err != nil {
			return nil, err
		}
	}
	if o.Samples {
		rule := rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods/status"}, Verbs: []string{"patch"}}
		if err = c.allow(ctx, "gpushare-nominations", rule); err != nil {
			return nil, err
		}
	}
	if o.Guard {
		if err = c.Apply(ctx, filepath.Join(root, "deploy", "guard")); err != nil {
			return nil, err
		}
	}
	if c.pluginKubeconfig, err = c.ServiceAccountKubeconfig(ctx, "kube-system", "gpushare-device-plugin"); err != nil {
		return nil, err
	}
	if o.Replicas > 0 {
		return c, c.startReplicas(ctx)
	}
	return c, c.startExtender(ctx)
}

// AllowFairShare gives the extender the rights that the chart gives it for fair sharing. The guard, which the chart installs with
// them, isn't there.
func (c *Cluster) AllowFairShare(ctx context.Context) error {
	return c.allow(ctx, "gpushare-fair-share",
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"patch"}},
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"namespaces"}, Verbs: []string{"list", "watch"}},
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims", "persistentvolumes"}, Verbs: []string{"get"}})
}

// allow gives the extender further rights.
func (c *Cluster) allow(ctx context.Context, name string, rules ...rbacv1.PolicyRule) error {
	meta := metav1.ObjectMeta{Name: name}
	role := &rbacv1.ClusterRole{ObjectMeta: meta, Rules: rules}
	if _, err := c.Client.RbacV1().ClusterRoles().Create(ctx, role, metav1.CreateOptions{}); err != nil {
		return err
	}
	_, err := c.Client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: metav1.NamespaceSystem, Name: "gpushare-extender"}},
	}, metav1.CreateOptions{})
	return err
}

func (c *Cluster) startExtender(ctx context.Context) error {
	kubeconfig, err := c.ServiceAccountKubeconfig(ctx, "kube-system", "gpushare-extender")
	if err != nil {
		return err
	}
	if kubeconfig, err = c.throughProxy(kubeconfig); err != nil {
		return err
	}
	c.Extender = &controlplane.Process{
		Name: "gpushare-extender", Path: c.ExtenderBinary(c.options.EarlierVersion),
		Args: append([]string{
			"--kubeconfig=" + kubeconfig, "--listen-address=" + c.port.Address(), "--ui-listen-address=" + c.pagePort.Address(), "-v=2",
		}, c.options.ExtenderArgs...),
		LogPath: filepath.Join(c.options.Dir, "extender.log"),
		Ready:   controlplane.HTTPReady(c.ExtenderURL + "/readyz"),
	}
	return c.Extender.Start(ctx)
}

// RestartExtenderWith restarts the extender with more flags for the rest of the test. A flag replaces an earlier one of its
// name.
func (c *Cluster) RestartExtenderWith(t testing.TB, flags ...string) {
	t.Helper()
	before := c.Extender.Args
	restart := func(args []string) {
		c.Extender.Args = args
		check.Must(t, c.Extender.Restart(context.WithoutCancel(t.Context())))
	}
	restart(slices.Concat(before, flags))
	t.Cleanup(func() { restart(before) })
}

// PriorityClass creates the priority class with this value if the cluster has none, and returns its name.
func (c *Cluster) PriorityClass(t testing.TB, value int32) string {
	t.Helper()
	class := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("p", value)}, Value: value}
	if _, err := c.Client.SchedulingV1().PriorityClasses().Create(t.Context(), class, metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
		check.Must(t, err)
	}
	return class.Name
}

// throughProxy returns a kubeconfig that uses a proxy, if the options ask for one.
func (c *Cluster) throughProxy(kubeconfig string) (string, error) {
	if !c.options.ThroughProxy {
		return kubeconfig, nil
	}
	var err error
	if c.Proxy, err = c.StartProxy(); err != nil {
		return "", err
	}
	return c.Proxy.Kubeconfig(kubeconfig)
}

// Stop ends all processes. Dir is kept. Stopping twice is no error.
func (c *Cluster) Stop() error {
	var errs []error
	for _, node := range c.nodes {
		errs = append(errs, node.Stop())
	}
	c.nodes = nil
	if c.Extender != nil {
		errs = append(errs, c.Extender.Kill())
	}
	if c.service != nil {
		errs = append(errs, c.service.close())
		c.service = nil
	}
	for _, replica := range c.Replicas {
		errs = append(errs, replica.Kill())
	}
	for _, port := range c.replicaPorts {
		port.Release()
	}
	c.replicaPorts = nil
	if c.Proxy != nil {
		errs = append(errs, c.Proxy.Close())
	}
	if c.ControlPlane != nil {
		errs = append(errs, c.ControlPlane.Stop())
	}
	if c.port != nil {
		c.port.Release()
		c.pagePort.Release()
		c.port = nil
	}
	return errors.Join(errs...)
}

// Processes returns the programs that run or have run.
func (c *Cluster) Processes() []*controlplane.Process {
	processes := c.ControlPlane.Processes()
	if c.Extender != nil {
		processes = append(processes, c.Extender)
	}
	processes = append(processes, c.Replicas...)
	for _, node := range c.nodes {
		processes = append(processes, node.Plugin)
	}
	return processes
}

// Binary returns the path of a binary in bin/.
func (c *Cluster) Binary(name string) string { return filepath.Join(c.root, "bin", name) }

// ExtenderBinary returns the path of the extender of the earlier version in bin/former, or of the present one.
func (c *Cluster) ExtenderBinary(earlier bool) string {
	if earlier {
		return c.Binary("former/gpushare-extender")
	}
	return c.Binary("gpushare-extender")
}

// Manifests returns the path of a folder in deploy/, of the earlier version in bin/former or of the present one.
func (c *Cluster) Manifests(folder string, earlier bool) string {
	if earlier {
		return c.Binary("former/deploy/" + folder)
	}
	return filepath.Join(c.root, "deploy", folder)
}

// KubeBinary returns the path of a binary of the Kubernetes version under test.
func (c *Cluster) KubeBinary(name string) string {
	return filepath.Join(controlplane.KubeDir(c.root), name)
}

// StartForTest starts a Cluster and stops it when the test ends. If a program is not built it skips the test, or fails it
// if controlplane.RequireEnv is set.
func StartForTest(t testing.TB, o Options) *Cluster {
	t.Helper()
	c := startForTest(t, o)
	t.Cleanup(func() { c.endForTest(t) })
	return c
}

func startForTest(t testing.TB, o Options) *Cluster {
	t.Helper()
	if err := built(); err != nil {
		if os.Getenv(controlplane.RequireEnv) != "" {
			t.Fatal(err)
		}
		fmt.Fprintf(os.Stderr, "SKIPPED %s: %v\n", t.Name(), err)
		t.Skip(err)
	}
	// Not t.TempDir: its paths are too long for Unix sockets, and a failed test must keep its logs.
	dir, err := os.MkdirTemp("", "gpushare-")
	check.Must(t, err)
	o.Dir = dir
	o.ControlPlane.Env = append(o.ControlPlane.Env, controlplane.SeldomGC)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	c, err := Start(ctx, o)
	check.Must(t, err)
	return c
}

// endForTest stops the cluster. Of a failed test it keeps the logs and prints their ends.
func (c *Cluster) endForTest(t testing.TB) {
	t.Helper()
	if t.Failed() {
		for _, p := range c.Processes() {
			t.Logf("the end of %s:\n%s", p.LogPath, p.Tail(15))
		}
		t.Logf("the logs are in %s", c.options.Dir)
	}
	check.NoError(t, c.Stop())
	if !t.Failed() {
		check.NoError(t, os.RemoveAll(c.options.Dir))
	}
}

// built returns an error that names a program that is not built.
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

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Options configure a control plane. The zero value runs etcd, kube-apiserver, and kube-scheduler without an extender.
type Options struct {
	// Dir is the folder for data, logs, certificates and kubeconfigs; it is created if missing. StartForTest chooses
	// one.
	Dir string
	// KubeDir is the folder of the binaries; by default KubeDir of this repository.
	KubeDir string

	Scheduler        SchedulerOptions
	WithoutScheduler bool
	// ControllerManager also runs kube-controller-manager: Deployments, Jobs, garbage collection, node taints. Without
	// it, the admission plugins that rely on it are disabled.
	ControllerManager bool
	// ExtraArgs are additional flags by component name ("kube-scheduler"). Of two equal flags the last one counts.
	ExtraArgs map[string][]string
	// Env are additional variables of the components' environment.
	Env []string
}

func (o Options) withDefaults() (Options, error) {
	root, err := RepositoryRoot()
	if o.KubeDir == "" && err == nil {
		o.KubeDir = KubeDir(root)
	}
	if o.Scheduler.ConfigFile == "" && err == nil {
		o.Scheduler.ConfigFile = filepath.Join(root, "config", "scheduler-config.yaml")
	}
	if o.KubeDir == "" || o.Scheduler.ConfigFile == "" {
		return o, err // The repository is only needed for the defaults.
	}
	return o, nil
}

// ControlPlane is a running control plane. The components may be killed, paused and restarted at will.
type ControlPlane struct {
	// Dir holds all files of the control plane.
	Dir string
	// KubeconfigPath, Config and Client belong to an administrator (group system:masters). They have no client-side
	// rate limit, and the API server's priority and fairness does not apply to them.
	KubeconfigPath string
	Config         *rest.Config
	Client         kubernetes.Interface

	Etcd      *Process
	APIServer *Process
	// Scheduler and ControllerManager are nil if they don't run.
	Scheduler         *Process
	ControllerManager *Process

	options   Options
	authority *authority
	files     files

	etcdPort, apiPort   *Port
	schedulerKubeconfig string
	// schedulerURL is kube-scheduler's address for probes and metrics.
	schedulerURL string
	ports        []*Port
	proxies      []*Proxy
}

// Start starts a control plane and returns when all components are ready. After an error it stops those that it
// started. ctx bounds only the start.
func Start(ctx context.Context, o Options) (*ControlPlane, error) {
	if o.Dir == "" {
		return nil, errors.New("starting the control plane: Options.Dir is empty")
	}
	if err := o.Binaries(); err != nil {
		return nil, fmt.Errorf("starting the control plane: %w", err)
	}
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("starting the control plane: %w", err)
	}
	c := &ControlPlane{Dir: dir, options: o}
	if err := c.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("starting the control plane: %w", err), c.Stop())
	}
	return c, nil
}

func (c *ControlPlane) start(ctx context.Context) error {
	if err := c.prepare(); err != nil {
		return err
	}
	if err := c.startEtcd(ctx); err != nil {
		return err
	}
	if err := c.startAPIServer(ctx); err != nil {
		return err
	}
	if err := c.waitForFirstObjects(ctx); err != nil {
		return err
	}
	if c.options.ControllerManager {
		if err := c.startControllerManager(ctx); err != nil {
			return err
		}
	}
	if !c.options.WithoutScheduler {
		return c.StartScheduler(ctx, c.options.Scheduler)
	}
	return nil
}

// prepare creates the files that the components read.
func (c *ControlPlane) prepare() (err error) {
	if c.authority, err = newAuthority(); err != nil {
		return err
	}
	if c.files, err = c.authority.write(filepath.Join(c.Dir, "pki")); err != nil {
		return err
	}
	if c.etcdPort, err = c.reservePort(); err != nil {
		return err
	}
	if c.apiPort, err = c.reservePort(); err != nil {
		return err
	}
	if c.KubeconfigPath, err = c.Kubeconfig("admin", "system:masters"); err != nil {
		return err
	}
	if c.schedulerKubeconfig, err = c.Kubeconfig("system:kube-scheduler"); err != nil {
		return err
	}
	if c.Config, err = clientcmd.BuildConfigFromFlags("", c.KubeconfigPath); err != nil {
		return fmt.Errorf("reading the administrator's kubeconfig: %w", err)
	}
	c.Config.QPS = -1 // No limit.
	if c.Client, err = kubernetes.NewForConfig(c.Config); err != nil {
		return fmt.Errorf("making the administrator's client: %w", err)
	}
	return nil
}

func (c *ControlPlane) reservePort() (*Port, error) {
	port, err := ReservePort()
	if err != nil {
		return nil, err
	}
	c.ports = append(c.ports, port)
	return port, nil
}

func (c *ControlPlane) writeSchedulerConfig(o SchedulerOptions) (string, error) {
	if o.ConfigFile == "" {
		o.ConfigFile = c.options.Scheduler.ConfigFile
	}
	shipped, err := os.ReadFile(o.ConfigFile)
	if err != nil {
		return "", err
	}
	config, err := schedulerConfig(shipped, c.schedulerKubeconfig, o)
	if err != nil {
		return "", fmt.Errorf("%s: %w", o.ConfigFile, err)
	}
	path := filepath.Join(c.Dir, "scheduler-config.yaml")
	return path, os.WriteFile(path, config, 0o600)
}

// waitForFirstObjects waits for the namespaces and the Service that the API server creates only after it has reported ready.
func (c *ControlPlane) waitForFirstObjects(ctx context.Context) error {
	namespace := func(name string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := c.Client.CoreV1().Namespaces().Get(ctx, name, metav1.GetOptions{})
			return err
		}
	}
	for what, get := range map[string]func(context.Context) error{
		"namespace default":     namespace(metav1.NamespaceDefault),
		"namespace kube-system": namespace(metav1.NamespaceSystem),
		"Service default/kubernetes": func(ctx context.Context) error {
			_, err := c.Client.CoreV1().Services(metav1.NamespaceDefault).Get(ctx, "kubernetes", metav1.GetOptions{})
			return err
		},
	} {
		if err := untilFound(ctx, get); err != nil {
			return fmt.Errorf("waiting for %s: %w", what, err)
		}
	}
	return nil
}

// waitForDefaultAccount waits for the ServiceAccount that pods in namespace "default" need.
func (c *ControlPlane) waitForDefaultAccount(ctx context.Context) error {
	err := untilFound(ctx, func(ctx context.Context) error {
		_, err := c.Client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	if err != nil {
		return fmt.Errorf("waiting for ServiceAccount default/default: %w", err)
	}
	return nil
}

func untilFound(ctx context.Context, get func(context.Context) error) error {
	return wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, readyTimeout, true, func(ctx context.Context) (bool, error) {
		err := get(ctx)
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		return err == nil, err
	})
}

// Processes returns the components that run or have run.
func (c *ControlPlane) Processes() []*Process {
	var out []*Process
	for _, p := range []*Process{c.Scheduler, c.ControllerManager, c.APIServer, c.Etcd} {
		if p != nil {
			out = append(out, p)
		}
	}
	return out
}

// Stop kills all processes and returns when they have ended. It doesn't terminate them: the API server would wait for
// its open watches, and etcd has written what it has acknowledged. Dir is kept. Stopping twice is no error.
func (c *ControlPlane) Stop() error {
	var errs []error
	for _, p := range c.proxies {
		errs = append(errs, p.Close())
	}
	for _, p := range c.Processes() {
		errs = append(errs, p.Kill())
	}
	for _, p := range c.ports {
		p.Release()
	}
	return errors.Join(errs...)
}

package controlplane

import (
	"context"
	"fmt"
	"path/filepath"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Names of the components: the names of their binaries, and the keys of Options.ExtraArgs.
const (
	etcd              = "etcd"
	apiServer         = "kube-apiserver"
	scheduler         = "kube-scheduler"
	controllerManager = "kube-controller-manager"
)

// NativeGroups returns the ExtraArgs that turn PodGroups on.
func NativeGroups() map[string][]string {
	const gate = "--feature-gates=GenericWorkload=true"
	return map[string][]string{apiServer: {gate, "--runtime-config=scheduling.k8s.io/v1beta1=true"}, scheduler: {gate}}
}

// components returns the names of the components to run.
func (o Options) components() []string {
	names := []string{etcd, apiServer}
	if !o.WithoutScheduler {
		names = append(names, scheduler)
	}
	if o.ControllerManager {
		names = append(names, controllerManager)
	}
	return names
}

// process returns a component that is not started yet.
func (c *ControlPlane) process(name, readyURL string, args ...string) *Process {
	return &Process{
		Name:    name,
		Path:    filepath.Join(c.options.KubeDir, name),
		Args:    append(args, c.options.ExtraArgs[name]...),
		Env:     c.options.Env,
		LogPath: filepath.Join(c.Dir, "logs", name+".log"),
		Ready:   HTTPReady(readyURL),
	}
}

func (c *ControlPlane) startEtcd(ctx context.Context) error {
	peers, err := c.reservePort()
	if err != nil {
		return err
	}
	clients := c.etcdPort
	c.Etcd = c.process(etcd, clients.URL("http")+"/readyz",
		"--name=gpushare",
		"--data-dir="+filepath.Join(c.Dir, "etcd"),
		// The data must survive a killed process but not a power cut: the kernel keeps written data without fsync.
		"--unsafe-no-fsync",
		"--listen-client-urls="+clients.URL("http"),
		"--advertise-client-urls="+clients.URL("http"),
		"--listen-peer-urls="+peers.URL("http"),
		"--initial-advertise-peer-urls="+peers.URL("http"),
		"--initial-cluster=gpushare="+peers.URL("http"),
		"--log-level=warn",
	)
	return c.Etcd.Start(ctx)
}

func (c *ControlPlane) startAPIServer(ctx context.Context) error {
	args := []string{
		"--etcd-servers=" + c.etcdPort.URL("http"),
		"--bind-address=127.0.0.1",
		"--secure-port=" + c.apiPort.String(),
		// The API server rejects a loopback address as an endpoint of the Service kubernetes, so the Service gets no
		// endpoints.
		"--advertise-address=127.0.0.1",
		"--endpoint-reconciler-type=none",
		"--tls-cert-file=" + c.files.servingCertificate,
		"--tls-private-key-file=" + c.files.servingKey,
		"--client-ca-file=" + c.files.ca,
		"--authorization-mode=Node,RBAC",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file=" + c.files.accountKey,
		"--service-account-key-file=" + c.files.accountPublicKey,
		"--service-cluster-ip-range=10.0.0.0/24",
		"--allow-privileged=true", // As kubeadm does: the device plugin's DaemonSet needs it.
	}
	if !c.options.ControllerManager {
		// Both plugins rely on a controller. ServiceAccount rejects pods until their namespace has a ServiceAccount
		// "default". TaintNodesByCondition taints each new node until the node lifecycle controller removes the taint.
		args = append(args, "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition")
	}
	c.APIServer = c.process(apiServer, c.apiPort.URL("https")+"/readyz", args...)
	return c.APIServer.Start(ctx)
}

// secured returns the flags that kube-scheduler and kube-controller-manager share: TLS on a reserved port, and their
// metrics readable with a client certificate of system:masters.
func (c *ControlPlane) secured(port *Port, kubeconfig string) []string {
	return []string{
		"--bind-address=127.0.0.1",
		"--secure-port=" + port.String(),
		"--tls-cert-file=" + c.files.servingCertificate,
		"--tls-private-key-file=" + c.files.servingKey,
		"--client-ca-file=" + c.files.ca,
		"--authentication-kubeconfig=" + kubeconfig,
		"--authentication-skip-lookup=true",
		"--authorization-kubeconfig=" + kubeconfig,
		"--leader-elect=false",
	}
}

func (c *ControlPlane) startControllerManager(ctx context.Context) error {
	port, err := c.reservePort()
	if err != nil {
		return err
	}
	kubeconfig, err := c.Kubeconfig("system:kube-controller-manager")
	if err != nil {
		return err
	}
	args := append(c.secured(port, kubeconfig),
		"--kubeconfig="+kubeconfig,
		"--use-service-account-credentials=true",
		"--service-account-private-key-file="+c.files.accountKey,
		"--root-ca-file="+c.files.ca,
		// Nodes without a kubelet send no heartbeats. They must stay ready for longer than any test.
		"--node-monitor-grace-period=24h",
		"--kube-api-qps=1000",
		"--kube-api-burst=1000",
	)
	process := c.process(controllerManager, port.URL("https")+"/healthz", args...)
	if err := process.Start(ctx); err != nil {
		return err
	}
	c.ControllerManager = process
	return c.waitForDefaultAccount(ctx)
}

// StartScheduler starts kube-scheduler with these options. It replaces a running one.
func (c *ControlPlane) StartScheduler(ctx context.Context, o SchedulerOptions) error {
	config, err := c.writeSchedulerConfig(o)
	if err != nil {
		return fmt.Errorf("configuring %s: %w", scheduler, err)
	}
	if c.Scheduler == nil {
		port, err := c.reservePort()
		if err != nil {
			return err
		}
		kubeconfig := c.schedulerKubeconfig
		args := append([]string{"--config=" + config}, c.secured(port, kubeconfig)...)
		c.schedulerURL = port.URL("https")
		c.Scheduler = c.process(scheduler, c.schedulerURL+"/readyz", args...)
	}
	return c.Scheduler.Restart(ctx)
}

// SchedulerMetrics returns kube-scheduler's metrics in Prometheus' text format.
func (c *ControlPlane) SchedulerMetrics(ctx context.Context) ([]byte, error) {
	config := rest.CopyConfig(c.Config)
	config.Host = c.schedulerURL
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	return client.RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
}

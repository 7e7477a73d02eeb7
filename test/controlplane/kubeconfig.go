package controlplane

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// tokenSeconds is the lifetime of a ServiceAccount token: longer than any test.
const tokenSeconds = int64(24 * 60 * 60)

// Kubeconfig writes a kubeconfig with a client certificate for a user of these groups and returns its path. The user
// has the rights that RBAC grants; the group system:masters has all rights.
func (c *ControlPlane) Kubeconfig(user string, groups ...string) (string, error) {
	client, err := c.authority.client(user, groups)
	if err != nil {
		return "", err
	}
	return c.writeKubeconfig(user, &clientcmdapi.AuthInfo{
		ClientCertificateData: client.certificate, ClientKeyData: client.key,
	})
}

// ServiceAccountKubeconfig writes a kubeconfig with a token of the ServiceAccount and returns its path. The
// ServiceAccount must exist.
func (c *ControlPlane) ServiceAccountKubeconfig(ctx context.Context, namespace, name string) (string, error) {
	return c.tokenKubeconfig(ctx, namespace, name, "system:serviceaccount:"+namespace+":"+name, nil)
}

// NodeKubeconfig writes a kubeconfig with a token of the ServiceAccount that is bound to the node, as that of a DaemonSet's pod there, and
// returns its path.
func (c *ControlPlane) NodeKubeconfig(ctx context.Context, namespace, name string, node *corev1.Node) (string, error) {
	return c.tokenKubeconfig(ctx, namespace, name, "node-"+node.Name+"-"+name, &authenticationv1.BoundObjectReference{
		APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID,
	})
}

// tokenKubeconfig writes a kubeconfig for the user with a token of the ServiceAccount. bound is the object whose end ends the token; nil if there
// is none.
func (c *ControlPlane) tokenKubeconfig(ctx context.Context, namespace, name, user string, bound *authenticationv1.BoundObjectReference) (string, error) {
	seconds := tokenSeconds
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds, BoundObjectRef: bound}}
	answer, err := c.Client.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, name, request, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("requesting a token of ServiceAccount %s/%s: %w", namespace, name, err)
	}
	return c.writeKubeconfig(user, &clientcmdapi.AuthInfo{Token: answer.Status.Token})
}

// PodKubeconfig writes a kubeconfig with the token that the pod's containers would get and returns its path. The token
// is bound to the pod: the API server knows the pod's node, and rejects the token once the pod is deleted.
func (c *ControlPlane) PodKubeconfig(ctx context.Context, pod *corev1.Pod) (string, error) {
	return c.tokenKubeconfig(ctx, pod.Namespace, pod.Spec.ServiceAccountName, "pod-"+pod.Namespace+"-"+pod.Name, &authenticationv1.BoundObjectReference{
		APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID,
	})
}

func (c *ControlPlane) writeKubeconfig(user string, auth *clientcmdapi.AuthInfo) (string, error) {
	config := clientcmdapi.NewConfig()
	config.Clusters["gpushare"] = &clientcmdapi.Cluster{Server: c.apiPort.URL("https"), CertificateAuthorityData: c.authority.pem}
	config.AuthInfos[user] = auth
	config.Contexts["gpushare"] = &clientcmdapi.Context{Cluster: "gpushare", AuthInfo: user}
	config.CurrentContext = "gpushare"
	path := filepath.Join(c.Dir, "kubeconfig", strings.ReplaceAll(user, ":", "-")+".yaml")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		return "", fmt.Errorf("writing the kubeconfig of %s: %w", user, err)
	}
	return path, nil
}
